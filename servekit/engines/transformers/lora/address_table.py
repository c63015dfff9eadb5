"""The addresses of adapters' factors on a GPU, where the graphs of decode steps find them.

    tensor[layer, number] = address of `down`, address of `up`, rank

A recorded graph keeps the addresses of its tensors, but adapters come and go, and sleeping moves
them. So only this table has a fixed address; its content is sent again when anything has changed.
The number 0 is the base's, with rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

#: Numbers of the first table; a full one is replaced by one of twice as many.
_NUMBERS = 32
_LEAST_RANK = 16


@dataclass(frozen=True, slots=True)
class Stack:
    """The factors of all adapters on one layer: `down` [ranks, in], `up` [ranks, out].

    `owners` has the adapter's uid for each rank, `places` the range of ranks for each uid. Stacks
    with the same owners have the same `key`, in any layer.
    """

    key: int
    owners: tuple[int, ...]
    places: dict[int, tuple[int, int]]
    down: Tensor
    up: Tensor


class AddressTable:
    """The table of one model's adapters, made at the first use.

    Graphs are recorded for one `generation` of it: another one has more layers, larger ranks or
    another address.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensor: Tensor | None = None
        self._stacks: dict[str, Stack] = {}
        self._rows: dict[str, int] = {}  # of layers; those without adapters keep theirs
        self._ranks: dict[str, int] = {}  # the largest padded rank that a layer ever had
        self._numbers: dict[int, int] = {}  # by the adapter's uid
        self._changed = False
        self.generation = 1  # never 0, which stands for steps without adapters

    def take_number(self, uid: int) -> int:
        """Return the number of a new adapter, until it is freed."""
        taken = set(self._numbers.values())
        self._numbers[uid] = next(number for number in count(1) if number not in taken)
        return self._numbers[uid]

    def free_number(self, uid: int) -> None:
        """Free an adapter's number; no slot has it any more."""
        self._numbers.pop(uid, None)

    def set_stack(self, layer: str, stack: Stack | None) -> None:
        """Set the factors of a layer."""
        self._changed = True
        if stack is None:
            self._stacks.pop(layer, None)
            return
        self._stacks[layer] = stack
        largest = max(_pad_rank(end - first) for first, end in stack.places.values())
        if largest > self._ranks.get(layer, 0):
            self._ranks[layer] = largest
            self._rows.setdefault(layer, len(self._rows))
            self.generation += 1

    def entries(self, layer: str) -> tuple[Tensor, int]:
        """Return the entries of a layer by number, int64 [numbers, 3], and its padded rank."""
        assert self._tensor is not None, "there is no table before it is sent"
        return self._tensor[self._rows[layer]], self._ranks[layer]

    def send(self) -> None:
        """Send changes to the device, in order with the steps and without waiting."""
        if not self._changed and self._tensor is not None:
            return
        values = self._lay_out()
        if self._tensor is None or self._tensor.shape != values.shape:
            self._tensor = torch.zeros_like(values, device=self._device)
            self.generation += 1
        if self._device.type == "cuda":
            values = values.pin_memory()
        self._tensor.copy_(values, non_blocking=True)
        self._changed = False

    def drop(self) -> None:
        """Free the table, before the factors move; it is made anew at the next use."""
        self._tensor = None

    def _lay_out(self) -> Tensor:
        numbers = _NUMBERS
        while numbers <= max(self._numbers.values(), default=0):
            numbers *= 2
        values = np.zeros((len(self._rows), numbers, 3), np.int64)
        for layer, stack in self._stacks.items():
            for uid, (first, end) in stack.places.items():
                addresses = (stack.down[first:].data_ptr(), stack.up[first:].data_ptr())
                values[self._rows[layer], self._numbers[uid]] = (*addresses, end - first)
        return torch.from_numpy(values)


def _pad_rank(rank: int) -> int:
    """Return the next rank for which kernels are compiled: a power of two from 16 on."""
    return max(_LEAST_RANK, 1 << (rank - 1).bit_length())
