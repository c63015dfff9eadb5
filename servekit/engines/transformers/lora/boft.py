"""BOFT without its CUDA extension.

PEFT compiles a kernel for the block-diagonal matrix when a BOFT layer is made, once more for each
layer if that fails, and then forces the butterfly factor to 1, so that any other adapter does not
fit. Where it does compile, it is known to have given zeros. The matrix is made once per layer here,
since BOFT is served merged: plain torch is fast enough, right on every device, and gives any
factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BlockDiagonal:
    """Stands where PEFT keeps its compiled extension."""

    @staticmethod
    def forward(blocks: Tensor) -> tuple[Tensor]:
        """[n, d, h, h] to the block-diagonal matrices [n, d * h, d * h]."""
        return (torch.stack([_diagonal(each) for each in blocks]),)


def _diagonal(blocks: Tensor) -> Tensor:
    make: Any = torch.block_diag  # untyped in the library
    matrix: Tensor = make(*blocks.unbind())
    return matrix


def use_torch() -> None:
    """Let PEFT take this for its extension; cheap, and may be repeated."""
    from peft.tuners.boft import layer

    library: Any = layer
    library._FBD_CUDA = BlockDiagonal
