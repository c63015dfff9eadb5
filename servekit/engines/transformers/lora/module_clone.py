"""A second tree of modules over the same tensors.

PEFT changes the model it is given: layers are wrapped, weights merged, embeddings replaced. So it
is given a skeleton: all of the model's modules once more, with parameters of their own that share
the memory of the base's. It takes no memory on the device, and whatever is assigned to one of its
parameters stays with the skeleton.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: To look at numbers of any kind as integers, whose sum is the same in any order.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BaseChanged(RuntimeError):
    """The base model's own weights are not what they were; nothing it says can be trusted."""


class ModuleClones:
    """Makes skeletons of one model, which run with the model's plain attention."""

    def __init__(self, model: PreTrainedModel, attention: str | None) -> None:
        self.base: PreTrainedModel = _twin(model)
        if attention is not None:
            self.base.set_attn_implementation(attention)
        # By storage and not by address: after a sleep the same storage is elsewhere.
        self._shared = {_storage(tensor) for tensor in _tensors(model)}

    def new(self) -> PreTrainedModel:
        """One more, for an adapter to live in."""
        return _twin(self.base)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is the base model's."""
        return _storage(tensor) in self._shared

    def own(self, module: nn.Module) -> list[Tensor]:
        """A module's tensors that are not the base's, each memory once."""
        found = {t.data_ptr(): t for t in _tensors(module) if t.numel() and not self.owns(t)}
        return list(found.values())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise BaseChanged if the base's weights are others at the end of the block."""
        before = self._fingerprint()
        try:
            yield
        finally:
            if not torch.equal(before, self._fingerprint()):
                raise BaseChanged("Loading an adapter has changed the weights of the base model.")

    def _fingerprint(self) -> Tensor:
        tensors = (parameter.detach() for parameter in self.base.parameters())
        return torch.stack([t.view(_INTEGERS[t.element_size()]).sum() for t in tensors])

    @torch.no_grad()
    def logits(self, ids: list[int], last: int) -> Tensor:
        """What the base says by itself: float32 [last, vocabulary]."""
        return logits_of(self.base, ids, last)


@torch.no_grad()
def logits_of(model: Any, ids: list[int], last: int) -> Tensor:
    """Logits after each of the `last` tokens, float32 [last, vocabulary]."""
    device = next(model.parameters()).device
    found = model(input_ids=torch.tensor([ids], device=device), use_cache=False)
    logits: Tensor = found.logits[0, -last:]
    return logits.float()


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copy.deepcopy(model, memo)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
