"""Small operations of a model's layers as one kernel each, on a GPU in 16 bits.

transformers computes an RMSNorm in eight kernels and rotary embeddings in ten. In a decode step of
a small model these take more time than its matrix products, and reading prompts waits for Python to
start them. Each replacement must agree with the model's own operation on random states when the
model is loaded; otherwise the model keeps its own.

Source: transformers' modeling files, in which `apply_rotary_pos_emb` and classes named `…RMSNorm`
are copies of Llama's unless the model needs others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from servekit.errors import describe_error

log: Any = structlog.get_logger(__name__)

_HALF = (torch.float16, torch.bfloat16)
#: Relative error of rounding to 16 bits; another formula exceeds it by far.
_TOLERANCE = 1e-2
_ROTARY = "apply_rotary_pos_emb"
#: Classes of norms with another `forward`, by the model's own class.
_FUSED: dict[type, type[nn.Module]] = {}


@torch.no_grad()
def fuse_layers(model: nn.Module) -> None:
    """Replace what can be replaced in a model on a GPU in 16 bits; leave any other model alone."""
    like = next(model.parameters())
    if like.device.type != "cuda" or like.dtype not in _HALF:
        return
    norms = {type(one): one for one in model.modules() if _is_norm(one)}
    fused = {kind for kind, one in norms.items() if _works(_check_norm, one)}
    for one in model.modules():
        if type(one) in fused:
            one.__class__ = fused_norm(type(one))
    names = {type(one).__module__ for one in model.modules()}
    files = [file for name in names if hasattr(file := sys.modules.get(name), _ROTARY)]
    rotated = [file for file in files if _works(_fuse_rotary, file, like)]
    log.info("layers_fused", norms=len(fused), rotary=len(rotated))


def _works(work: Callable[..., None], *arguments: Any) -> bool:
    try:
        work(*arguments)
    except Exception as error:  # a compiler's error, another signature: any failure excludes it
        log.info("layer_not_fused", reason=describe_error(error))
        return False
    return True


def _agree(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).float().norm() / expected.float().norm())
    if not error <= _TOLERANCE or found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(f"it is off by {error:.1%}")


# ---------------------------------------------------------------- RMSNorm


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, Tensor)
        and weight.dim() == 1
        and weight.dtype in _HALF
        and isinstance(getattr(module, "variance_epsilon", None), float)
    )


def fused_norm(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of norms whose `forward` is one kernel.

    A class, so that copies of a module use their own weights.
    """

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    if kind not in _FUSED:
        names = {"forward": forward, "__module__": kind.__module__}
        _FUSED[kind] = type(kind.__name__, (kind,), names)
    return _FUSED[kind]


def _check_norm(norm: Any) -> None:
    made = torch.Generator(norm.weight.device).manual_seed(7)
    shape = (1, 7, norm.weight.shape[0])
    weight = norm.weight
    states = torch.randn(shape, generator=made, device=weight.device, dtype=weight.dtype) * 3
    _agree(fused_norm(type(norm)).forward(norm, states), norm(states))


# ---------------------------------------------------------------- rotary embeddings


def _fuse_rotary(file: Any, like: Tensor) -> None:
    from servekit.engines.transformers.decode import rotary_triton

    own = getattr(file, _ROTARY)
    if getattr(own, "fused", False):
        return

    @wraps(own)
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        if not more and not named and rotary_triton.fits(q, k, cos):
            return rotary_triton.rotate(q, k, cos, sin)
        states: tuple[Tensor, Tensor] = own(q, k, cos, sin, *more, **named)
        return states

    made = torch.Generator(like.device).manual_seed(7)

    def draw_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device=like.device, dtype=like.dtype)

    q, k = draw_tensor(1, 5, 6, 32).transpose(1, 2), draw_tensor(1, 5, 2, 32).transpose(1, 2)
    cos, sin = (draw_tensor(1, 5, 16).repeat(1, 1, 2) for _ in range(2))
    for found, expected in zip(
        rotary_triton.rotate(q, k, cos, sin), own(q, k, cos, sin), strict=True
    ):
        _agree(found, expected)
    apply_rotary_pos_emb.fused = True  # type: ignore[attr-defined]
    setattr(file, _ROTARY, apply_rotary_pos_emb)
