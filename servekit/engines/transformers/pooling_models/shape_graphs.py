"""CUDA graphs of whole forward passes over padded texts, one for each rounded shape of a batch.

A forward pass of a large encoder starts hundreds of kernels, which takes some 15 ms from Python,
however little there is to compute. A graph starts all of them at once. Lengths and numbers of
texts are rounded up, so that a few dozen graphs serve all requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.engines.transformers.decode.graphs import Graphs

#: The forward pass: ids, mask and token types, each [texts, tokens], to outputs [texts, …].
Forward = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]
#: Most graphs; of texts up to 512 tokens there are some 200 shapes.
_MOST_GRAPHS = 256
#: The least rounding of lengths, in tokens.
_LENGTH_STEP = 16


@dataclass(slots=True)
class _Shape:
    """The memory of a graph: its inputs, and the outputs that each replay overwrites."""

    inputs: tuple[Tensor, Tensor, Tensor | None]
    outputs: tuple[Tensor, ...] = ()

    def copy_batch(self, pad: int, ids: Tensor, mask: Tensor, types: Tensor | None) -> None:
        """Copy a batch in; the texts that fill it up are a padding token each."""
        texts, tokens = ids.shape
        for into, given, filler in zip(self.inputs, (ids, mask, types), (pad, 0, 0), strict=True):
            if into is not None:
                into.fill_(filler)
                if given is not None:
                    into[:texts, :tokens] = given
        self.inputs[1][texts:, 0] = 1  # attention to nothing at all is not a number


class ShapeGraphs:
    """A forward pass that runs by a graph from the second use of a shape on.

    A shape is rounded up, and what fills it up is padding: the model must not read it. Batches of
    more than `most_tokens`, padding included, have no graph.
    """

    def __init__(self, forward: Forward, device: torch.device, pad: int, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._forward = forward
        self._pad = pad
        self._graphs = Graphs(device, wanted=True)
        self._shapes: dict[tuple[int, int], _Shape] = {}

    @property
    def failure(self) -> str:
        """The reason why a graph could not be recorded, else ""."""
        return self._graphs.failure

    def run_shape(self, ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        """Return what `Forward` returns; the tensors are valid until the next call."""
        texts, tokens = ids.shape
        key = (round_up(texts, 1), round_up(tokens, 2, _LENGTH_STEP))
        known = key in self._shapes
        if key[0] * key[1] > self._most_tokens or not (known or len(self._shapes) < _MOST_GRAPHS):
            return self._forward(ids, mask, types)
        if not known:
            more = None if types is None else types.new_empty(key)
            self._shapes[key] = _Shape((ids.new_empty(key), mask.new_empty(key), more))
        shape = self._shapes[key]
        shape.copy_batch(self._pad, ids, mask, types)
        if known:
            changed = shape.outputs[0]
            self._graphs.run_graph(key, lambda: self._compute(shape), changed, rehearsed=True)
        else:
            shape.outputs = tuple(output.clone() for output in self._forward(*shape.inputs))
        return tuple(output[:texts] for output in shape.outputs)

    def _compute(self, shape: _Shape) -> None:
        for into, made in zip(shape.outputs, self._forward(*shape.inputs), strict=True):
            into.copy_(made)


def round_up(count: int, finer: int, least: int = 1) -> int:
    """Round up to one of 2 ** `finer` steps of each power of two, and to a multiple of `least`."""
    step = max(least, 1 << max(0, (count - 1).bit_length() - 1 - finer))
    return -(-count // step) * step
