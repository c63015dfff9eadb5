"""A second tree of modules over the same tensors.

PEFT changes the model that it is given: it wraps layers, merges weights and replaces embeddings. So
it is given a skeleton: a copy of all of the model's modules, with separate parameters that share
the memory of the base's. A skeleton takes no memory on the device, and assignments to its
parameters do not affect the base.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: Integer views of tensors of any dtype: an integer sum does not depend on the order.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BaseChanged(RuntimeError):
    """Raised if the base model's weights have changed; its output cannot be trusted any more."""


class ModuleClones:
    """Factory of skeletons of one model, which run with the model's plain attention."""

    def __init__(self, model: PreTrainedModel, attention: str | None) -> None:
        self.base: PreTrainedModel = clone_modules(model)
        if attention is not None:
            self.base.set_attn_implementation(attention)
        # By storage instead of address: sleeping moves the storage's memory.
        self._shared = {_storage_id(tensor) for tensor in _all_tensors(model)}

    def new(self) -> PreTrainedModel:
        """Return a new skeleton for an adapter."""
        return clone_modules(self.base)

    def shares_memory(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory is the base model's."""
        return _storage_id(tensor) in self._shared

    def own_tensors(self, module: nn.Module) -> list[Tensor]:
        """Return a module's tensors that are not the base's, each memory once."""
        found = {
            t.data_ptr(): t for t in _all_tensors(module) if t.numel() and not self.shares_memory(t)
        }
        return list(found.values())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise BaseChanged if the base's weights differ at the end of the block."""
        before = self._sum_weights()
        try:
            yield
        finally:
            if not torch.equal(before, self._sum_weights()):
                raise BaseChanged("Loading an adapter has changed the weights of the base model.")

    def _sum_weights(self) -> Tensor:
        tensors = (parameter.detach() for parameter in self.base.parameters())
        return torch.stack([t.view(_INTEGERS[t.element_size()]).sum() for t in tensors])


@torch.no_grad()
def logits_of(model: Any, ids: list[int], last: int) -> Tensor:
    """Return the logits after each of the `last` tokens, float32 [last, vocabulary]."""
    device = next(model.parameters()).device
    found = model(input_ids=torch.tensor([ids], device=device), use_cache=False)
    logits: Tensor = found.logits[0, -last:]
    return logits.float()


def clone_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second tree of a model's modules, over the same tensors."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copy.deepcopy(model, memo)


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _all_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
