"""How far apart two ways of computing the same thing may be.

All are relative: the norm of the difference over the norm of what is expected.

    layers   one adapted layer on its device against float32 on the CPU, and merged against not
    logits   the whole model: in a batch against alone, merged against not merged
    noise    what rounding makes of the logits; an adapter's effect below it cannot be told

float32 has 24 bits: a sum of some thousand products is off by 1e-6, more after BOFT's and OFT's
inverses. On a GPU, TF32 being off, sums are taken in another order and inverses by other routines:
an order more. bfloat16 has 8 bits, an error of 0.4 % in each rounding; a layer rounds its inputs'
product, the adapter's, and their sum, and thirty layers add up to some percent. float16 has 11.
What is wrong is far beyond: a layer without its adapter, with another's, or with zeroes is off by
the adapter's whole effect, which besides is compared for itself (`Tolerance.allowed`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    layers: float
    logits: float
    noise: float

    def allowed(self, effect: float) -> float:
        """For logits, where the adapter's effect on them is so large.

        Nearer to the adapter's own than to the base's, as far as rounding lets this be told.
        """
        return min(self.logits, max(effect / 2, self.noise))


_TABLE = {
    ("cpu", torch.float32): Tolerance(layers=1e-4, logits=1e-3, noise=1e-5),
    ("cuda", torch.float32): Tolerance(layers=1e-3, logits=1e-2, noise=1e-4),
    ("cpu", torch.bfloat16): Tolerance(layers=3e-2, logits=0.15, noise=5e-2),
    ("cuda", torch.bfloat16): Tolerance(layers=3e-2, logits=0.15, noise=5e-2),
    ("cpu", torch.float16): Tolerance(layers=5e-3, logits=5e-2, noise=1e-2),
    ("cuda", torch.float16): Tolerance(layers=5e-3, logits=5e-2, noise=1e-2),
}


def of(device: torch.device, dtype: torch.dtype) -> Tolerance:
    """The tolerances for a model of this type on this device."""
    return _TABLE.get((device.type, dtype), _TABLE["cuda", torch.bfloat16])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error, in float32; NaN where either has one."""
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))
