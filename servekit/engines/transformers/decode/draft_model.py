"""Proposals of a draft model: a smaller model with the same tokens.

Its keys and values lie in pages of its own, under the numbers of the model's blocks, so that the
model's scheduler allocates, shares and frees both. Nothing depends on what is in them: a draft that
is wrong is rejected.

A draft's token is drawn with the noise of its place, as the model's will be. With equal
distributions both draw the same token, and with similar ones mostly.

    pass 1       tokens that the draft has not read yet, the row's last one included
    pass 2 …     the token of the pass before, without waiting for the device

What is not read of a long prompt is read in chunks, one in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.job_state import find_common_length
from servekit.engines.api.speculation import Proposer, Wanted
from servekit.engines.transformers.batching.batch_processor import LazyZeros
from servekit.engines.transformers.batching.kv_cache import Shape, context_of
from servekit.engines.transformers.decode import device_sampling
from servekit.engines.transformers.decode.batch_slots import (
    COUNT,
    TOKEN,
    BatchSlot,
    BatchSlots,
    follow_tokens,
    slot_values,
)
from servekit.engines.transformers.decode.kernels import Kernel
from servekit.engines.transformers.decode.page_table import ChunkStep, Holder, Pages
from servekit.engines.transformers.decode.slot_steps import SlotSteps
from servekit.engines.transformers.request_row import Row

#: More unread tokens than this are read as a chunk, which has no CUDA graph and takes ten times as
#: long as a step on a GPU.
_FEW = 64


class DraftPages:
    """Keys and values of the draft, in pages with the numbers of the model's blocks."""

    def __init__(self, shape: Shape, pages: int, size: int, like: Tensor) -> None:
        self.size = size
        sizes = (2, shape.layers, pages, size, shape.kv_heads, shape.head_dim)
        count = int(np.prod(sizes)) * like.element_size()
        with LazyZeros():
            flat = torch.zeros(count, dtype=torch.uint8, device=like.device)
        states: Tensor = flat.view(dtype=like.dtype).view(*sizes)
        self._keys, self._values = states[0], states[1]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._keys[index], self._values[index]


@dataclass(slots=True)
class _Reading:
    """What the draft has read of a row: `known` of its tokens, and then those it `drafted`."""

    blocks: list[int]
    known: int = 0
    drafted: list[int] = field(default_factory=list)
    chained: int = 0  # blocks from the first on that are registered
    chain: int = 0  # hash of their tokens


class DraftProposer(Proposer[Row]):
    """A proposer of a draft model's tokens, for rows without images and within its context."""

    #: To go on, it reads all that the rows have said meanwhile, which takes as long as 100 steps.
    pause = 1024

    def __init__(
        self,
        model: PreTrainedModel,
        shape: Shape,
        cost: float,
        kernel: Kernel,
        *,
        graphs: bool,
        chunk: int,
    ) -> None:
        """`shape` is the draft's, and `chunk` the maximum number of tokens of a chunk."""
        self.cost = cost
        self._model: Any = model
        self._shape, self._kernel, self._graphs, self._chunk = shape, kernel, graphs, chunk
        embedding: Any = model.get_input_embeddings()
        self._vocab_size = int(embedding.weight.shape[0])
        self._readings: dict[str, _Reading] = {}
        self._filled: dict[int, int] = {}  # hash of all tokens up to a block's end, by block

    def attach_cache(self, pages: Pages, slots: BatchSlots) -> None:
        """Prepare for rows with this cache and these slots."""
        blocks = -(-pages.layer(0)[0].shape[0] // pages.stride)
        room = slots.pages * pages.size
        self._context = min(room, context_of(self._model.config.get_text_config()) or room)
        self._of_model, self._seated, self._target_size = pages, slots.taken, slots.vocab_size
        self._pages = DraftPages(self._shape, blocks + 1, pages.size, next(self.tensors()))
        self._slots = BatchSlots(slots.count, slots.pages, blocks, self._vocab_size, slots.device)
        self._steps = SlotSteps(self._model, self._pages, self._slots, self._kernel, self._graphs)

    def record_graphs(self, step_s: float) -> None:
        """Record CUDA graphs, before the first request; the model's own step takes `step_s`."""
        if self._graphs:
            self._steps.record_graphs(device_sampling.CHOOSING)
        self.cost = self._steps.time_step(device_sampling.CHOOSING[0]) / step_s

    def close(self) -> None:
        self._readings.clear()
        self._filled.clear()
        for name in ("_of_model", "_seated", "_pages", "_slots", "_steps"):
            vars(self).pop(name, None)  # missing if it could not open

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of its model on the device."""
        yield from self._model.parameters()
        yield from self._model.buffers()

    def forget(self, key: str) -> None:
        self._readings.pop(key, None)

    def propose(self, wanted: Wanted[Row]) -> dict[str, list[int]]:
        ready: list[tuple[BatchSlot, int, int]] = []
        left, read_chunk = self._slots.count, False
        for key, (_, count) in wanted.items():
            slot = self._seated[key]
            if slot.row.images is not None or slot.done >= self._context:
                continue
            known = self._find_known(slot)
            unread, few = slot.done + 1 - known, min(_FEW, left)
            if unread > max(few, 1) and not read_chunk:
                read_chunk = True
                known = self._read_chunk(slot, known)
                unread = slot.done + 1 - known
            if unread <= few:
                ready.append((slot, count, known))
                left -= unread
        return self._draft(ready) if ready else {}

    # ---- what it has read

    def _find_known(self, slot: BatchSlot) -> int:
        """Return how many tokens of a row need not be read; its last one always has to be."""
        row = slot.row
        blocks = self._of_model.blocks(row.key)
        reading = self._readings.get(row.key)
        if reading is None:
            reading = self._readings[row.key] = _Reading(list(blocks))
            self._find_shared(reading, row)
        elif reading.drafted:
            said = row.tokens_between(reading.known, reading.known + len(reading.drafted))
            reading.known += find_common_length(reading.drafted, said)
            reading.drafted = []
        if blocks[: len(reading.blocks)] != reading.blocks:  # exchanged for an equal one
            same = find_common_length(blocks, reading.blocks)
            reading.known = min(reading.known, same * self._pages.size)
            reading.chained = reading.chain = 0
        reading.blocks = list(blocks)
        reading.known = min(reading.known, slot.done)
        self._register_blocks(reading, row)
        for block in blocks[reading.known // self._pages.size :]:  # about to be overwritten
            self._filled.pop(block, None)
        return reading.known

    def _find_shared(self, reading: _Reading, row: Row) -> None:
        """Find the first blocks that the draft has read for another row."""
        size, chain = self._pages.size, 0
        for at, block in enumerate(reading.blocks):
            chain = hash((chain, *row.tokens_between(at * size, (at + 1) * size)))
            if self._filled.get(block) != chain:
                break
            reading.known = (at + 1) * size

    def _register_blocks(self, reading: _Reading, row: Row) -> None:
        size = self._pages.size
        while (reading.chained + 1) * size <= reading.known:
            start = reading.chained * size
            reading.chain = hash((reading.chain, *row.tokens_between(start, start + size)))
            self._filled[reading.blocks[reading.chained]] = reading.chain
            reading.chained += 1

    def _read_chunk(self, slot: BatchSlot, known: int) -> int:
        """Read more of a row, but its last token; return how many tokens are known."""
        row, size, device = slot.row, self._pages.size, self._slots.device
        until = min(slot.done, known + self._chunk)
        reading = self._readings[row.key]
        places = torch.arange(until)
        index = torch.tensor(reading.blocks)[places // size] * size + places % size
        tokens = [min(token, self._vocab_size - 1) for token in row.tokens_between(known, until)]
        self._model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.arange(known, until, device=device).unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            cache=Holder(ChunkStep(self._pages, index.to(device), until - known)),
            logits_to_keep=1,
        )
        reading.known = until
        self._register_blocks(reading, row)
        return until

    # ---- what it drafts

    def _draft(self, ready: Sequence[tuple[BatchSlot, int, int]]) -> dict[str, list[int]]:
        longest = max(slot.done for slot, _, _ in ready)
        passes = min(max(count for _, count, _ in ready), self._context - longest)
        mode = device_sampling.find_mode({slot.kind for slot, _, _ in ready})
        ints, floats, tables, spans = [], [], [], []
        later, numbers = [], []
        for slot, _, known in ready:
            own, real = slot_values(slot.row, known, slot.kind, self._vocab_size)
            own[COUNT] -= slot.done - known
            unread = slot.row.tokens_between(known, slot.done + 1)
            of_slot = follow_tokens(own, [min(token, self._vocab_size - 1) for token in unread])
            ints += of_slot
            spans.append(len(unread))
            floats += [real] * len(unread)
            tables += [self._readings[slot.row.key].blocks] * len(unread)
            later += follow_tokens(of_slot[-1], (0, 0))[1:]
            numbers.append(real)
        size = self._steps.fit_size(len(ints))
        self._slots.fill_slots(ints, floats, _pad_rows(tables, self._slots.trash), size)
        self._steps.run_slots(size, mode, spans)
        last = torch.tensor(np.cumsum(spans) - 1, device=self._slots.device)
        chosen = [self._steps.chosen[last]]
        if passes > 1:
            own_tables = [self._readings[slot.row.key].blocks for slot, _, _ in ready]
            size = self._steps.fit_size(len(ready))
            self._slots.fill_slots(later, numbers, _pad_rows(own_tables, self._slots.trash), size)
            self._slots.ints[: len(ready), TOKEN] = chosen[0].clamp(min=0)
        for _ in range(passes - 1):
            self._steps.run_slots(size, mode)
            chosen.append(self._steps.chosen[: len(ready)].clone())
        found = {}
        for (slot, count, _), tokens in zip(ready, torch.stack(chosen, 1).tolist(), strict=True):
            self._note_drafted(slot, tokens[:-1])
            allowed = [token if 0 <= token < self._target_size else None for token in tokens]
            stop = allowed.index(None) if None in allowed else len(tokens)
            if proposed := tokens[: min(count, stop)]:
                found[slot.row.key] = proposed
        return found

    def _note_drafted(self, slot: BatchSlot, read: list[int]) -> None:
        """Note that the draft has read all tokens of a row, and then these of its own.

        What lies beyond the row's pages is lost.
        """
        reading = self._readings[slot.row.key]
        room = len(reading.blocks) * self._pages.size
        reading.known = min(slot.done + 1, room)
        reading.drafted = read[: max(0, room - reading.known)]


def _pad_rows(rows: Sequence[Sequence[int]], filler: int) -> Any:
    """Return rows of different lengths as an array."""
    found = np.full((len(rows), max(map(len, rows))), filler, np.int32)
    for one, row in zip(found, rows, strict=True):
        one[: len(row)] = row
    return found
