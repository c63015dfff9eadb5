"""BOFT without its CUDA extension.

PEFT compiles a kernel for the block-diagonal matrix when a BOFT layer is created, again for each
layer if that fails, and then forces the butterfly factor to 1, so that adapters with another factor
do not fit. Where the kernel compiles, it is known to have returned zeros. BOFT is served merged, so
the matrix is computed once per layer: plain torch is fast enough, correct on every device, and
supports any factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BlockDiagonal:
    """Replacement of PEFT's compiled extension."""

    @staticmethod
    def forward(blocks: Tensor) -> tuple[Tensor]:
        """Convert blocks [n, d, h, h] to block-diagonal matrices [n, d * h, d * h]."""
        return (torch.stack([_block_diagonal(each) for each in blocks]),)


def _block_diagonal(blocks: Tensor) -> Tensor:
    make: Any = torch.block_diag  # untyped in the library
    matrix: Tensor = make(*blocks.unbind())
    return matrix


def use_torch() -> None:
    """Make PEFT use this module as its extension; cheap and repeatable."""
    from peft.tuners.boft import layer

    library: Any = layer
    library._FBD_CUDA = BlockDiagonal
