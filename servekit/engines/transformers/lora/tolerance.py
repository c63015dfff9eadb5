"""Tolerances for two computations of the same result.

All are relative: the norm of the difference over the norm of the expected result.

    layers   one adapted layer on its device against float32 on the CPU, and merged against unmerged
    logits   the whole model: in a batch against alone, merged against unmerged
    noise    effect of rounding on the logits; a smaller effect of an adapter cannot be detected

float32 has 24 bits: a sum of some thousand products is off by 1e-6, more after BOFT's and OFT's
inverses. On a GPU, with TF32 off, sums have another order and inverses other routines: ten times
more. bfloat16 has 8 bits, an error of 0.4 % in each rounding; a layer rounds its own product, the
adapter's, and their sum, and thirty layers add up to some percent. float16 has 11 bits. Real errors
are far larger: a layer without its adapter, with another's, or with zeros is off by the adapter's
whole effect, against which the error is also compared (`Tolerance.allowed`).
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
        """Return the tolerance for logits, given the adapter's relative effect on them.

        The result must be nearer to the adapter's logits than to the base's, as far as rounding
        allows.
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
    """Return the tolerances for a model of this dtype on this device."""
    return _TABLE.get((device.type, dtype), _TABLE["cuda", torch.bfloat16])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in float32; NaN if either tensor has one."""
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))
