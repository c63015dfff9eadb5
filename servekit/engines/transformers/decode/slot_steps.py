"""Steps of a model over the slots of a batch, each a CUDA graph where these are used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from servekit.engines.transformers.decode import batch_slots, device_sampling
from servekit.engines.transformers.decode.batch_slots import BatchSlots
from servekit.engines.transformers.decode.device_sampling import SamplingMode
from servekit.engines.transformers.decode.graphs import Graphs
from servekit.engines.transformers.decode.host_attention import group_queries
from servekit.engines.transformers.decode.kernels import Kernel
from servekit.engines.transformers.decode.page_table import DecodeStep, Holder, LayerPages
from servekit.engines.transformers.lora.adapter import Adapter
from servekit.engines.transformers.lora.batched_lora import BatchedLora

#: Repetitions of a step that is timed.
_TIMED = 4


class SlotSteps:
    """Steps of `model` over the first slots, each with one token.

    With `mixing` the slots may have adapters.
    """

    def __init__(
        self,
        model: Any,
        pages: LayerPages,
        slots: BatchSlots,
        kernel: Kernel,
        graphs: bool,
        mixing: BatchedLora | None = None,
    ) -> None:
        self._model = model
        self._mixing = mixing
        self._generation = 0  # of the graphs with adapters
        self._pages = pages
        self._slots = slots
        self._kernel = kernel
        self._holder = Holder()
        self._spans: Sequence[int] = ()
        self.graphs = Graphs(slots.device, graphs)
        #: The token that each slot's step has chosen.
        self.chosen = torch.zeros(slots.count, dtype=torch.int64, device=slots.device)
        #: The logits of each slot [slots, vocabulary] float32, once a step has left them.
        self.logits: Tensor | None = None

    @property
    def how(self) -> str:
        """Return a short description for people."""
        graphs = "CUDA graphs" if self.graphs.on else "no CUDA graphs"
        failure = f" ({self.graphs.failure})" if self.graphs.failure else ""
        return f"{graphs}{failure}, {self._kernel.name} attention"

    def fit_size(self, tokens: int) -> int:
        """Return how many slots a step of so many tokens runs."""
        return bucket_size(tokens, self._slots.count) if self.graphs.on else tokens

    def record_graphs(self, modes: Sequence[SamplingMode] = device_sampling.MODES) -> None:
        """Record all graphs that requests may need, with empty slots; the largest one first.

        Later ones reuse its memory. Where one cannot be recorded, the others are not tried.
        """
        for size, mode in self.list_steps(modes):
            if self.graphs.failure:
                return
            self.run_slots(size, mode)

    def list_steps(
        self, modes: Sequence[SamplingMode] = device_sampling.MODES
    ) -> list[tuple[int, SamplingMode]]:
        """Return all sizes and modes that requests may need, the largest size first."""
        return [(size, mode) for size in batch_sizes(self._slots.count) for mode in modes]

    def run_slots(
        self,
        size: int,
        mode: SamplingMode,
        spans: Sequence[int] = (),
        adapters: Sequence[Adapter | None] = (),
    ) -> None:
        """Run the first `size` slots; `spans` are the numbers of adjacent ones of a request.

        `adapters` are those of the first slots; others have none.
        """
        self._spans = spans or [1] * size
        generation = self._lay_out_adapters(size, adapters)
        work = partial(self._compute_step, size, mode)
        self.graphs.run_graph((size, mode), work, self._slots.ints, generation=generation)

    def record_step(
        self, size: int, mode: SamplingMode, adapters: Sequence[Adapter | None]
    ) -> None:
        """Record the graph of a step, if there is none, while the slots may be in use."""
        if self.graphs.failure:
            return
        generation = self._lay_out_adapters(size, adapters)
        work = partial(self._compute_step, size, mode)
        self.graphs.prepare_graph((size, mode), work, self._slots.ints, generation=generation)

    def _lay_out_adapters(self, size: int, adapters: Sequence[Adapter | None]) -> int:
        """Return the generation of graphs for the adapters, and drop those of earlier ones."""
        if self._mixing is None:
            return 0
        numbers = self._slots.ints[:size, batch_slots.ADAPTER]
        generation = self._mixing.lay_out_slots(adapters, numbers)
        if generation and generation != self._generation:
            self.graphs.keep_generation(generation)
            self._generation = generation
        return generation

    def time_step(self, mode: SamplingMode) -> float:
        """Return how long a step of an empty slot takes, s."""
        took_s = []
        for _ in range(_TIMED):
            began_s = time.perf_counter()
            self.run_slots(1, mode)
            self.chosen[0].item()  # waits for the device
            took_s.append(time.perf_counter() - began_s)
        return min(took_s)

    def _compute_step(self, size: int, mode: SamplingMode) -> None:
        """Run the step, using only tensors at fixed addresses and without waiting for any."""
        ints, floats = self._slots.ints[:size], self._slots.floats[:size]
        logits = self._forward_slots(ints, self._slots.table[:size])
        if mode.free:
            if self.logits is None:
                shape = (self._slots.count, logits.shape[-1])
                self.logits = torch.empty(shape, dtype=torch.float32, device=logits.device)
            self.logits[:size].copy_(logits)
            return
        tokens = device_sampling.choose_tokens(logits.float(), ints, floats, mode)
        self.chosen[:size].copy_(tokens)
        ints[:, batch_slots.TOKEN].copy_(tokens.clamp(min=0))  # an invalid token ends its row later
        advance_slots(ints)

    def _forward_slots(self, ints: Tensor, table: Tensor) -> Tensor:
        """Return the logits of each slot, [slots, vocabulary]."""
        position, size = ints[:, batch_slots.POSITION].contiguous(), self._pages.size
        place = (position // size).clamp(max=table.shape[1] - 1).unsqueeze(1)
        page = table.gather(1, place).squeeze(1).long()
        slots, lengths = page * size + position % size, (position + 1).int()
        layout = DecodeStep(self._pages, self._kernel.attend, table, slots, lengths)
        if not self._kernel.captured:
            layout.groups = group_queries(table.long(), lengths.tolist(), self._spans, size)
        self._holder.layout = layout
        logits: Tensor = self._model(
            input_ids=ints[:, batch_slots.TOKEN].unsqueeze(0),
            position_ids=(position + ints[:, batch_slots.SHIFT]).unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            cache=self._holder,
        ).logits
        return logits[0]


def bucket_size(seated: int, most: int) -> int:
    """Return the batch size for a number of slots: there are few sizes, each with its own graph."""
    return min(most, 1 << (seated - 1).bit_length())


def batch_sizes(most: int) -> list[int]:
    """Return all batch sizes, the largest first."""
    return sorted({bucket_size(seated, most) for seated in range(1, most + 1)}, reverse=True)


def advance_slots(ints: Tensor) -> None:
    """Move all slots on by one token, but for empty ones."""
    ints[:, batch_slots.POSITION : batch_slots.COUNT + 1].add_(ints[:, batch_slots.ALIVE :])
