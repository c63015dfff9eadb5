"""Steps that generate one token per request, each started before the last one's are known.

    host     start n+1 │ tokens of n: emit, end   │ start n+2 │ tokens of n+1 …
    device   ── n ─────┼───── n+1 ────────────────┼── n+2 ──

A request that ended with step n still takes part in n+1: that step writes past its end, into a page
that was still the request's own when the step started, and its token is discarded. A page that
another request gets is written only by later steps, in the device's order.

Rows that need the host between logits and token (`device_sampling.needs_host`) make the step
synchronous: the forward pass is the same, but `sampling` chooses the tokens of all rows. So do
proposed tokens (`speculative`), which can only be looked for once the last ones are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.continuous_batching.requests import RequestStatus

from servekit.engines.api.base import StepOutput
from servekit.engines.api.job_state import NOT_A_NUMBER
from servekit.engines.api.speculation import Speculator, join_outputs
from servekit.engines.transformers.decode import device_sampling
from servekit.engines.transformers.decode.batch_slots import BatchSlot, BatchSlots
from servekit.engines.transformers.decode.device_sampling import SamplingMode
from servekit.engines.transformers.decode.draft_model import DraftProposer
from servekit.engines.transformers.decode.kernels import Kernel
from servekit.engines.transformers.decode.page_table import Pages
from servekit.engines.transformers.decode.slot_steps import SlotSteps, bucket_size
from servekit.engines.transformers.lora.adapter import Adapter
from servekit.engines.transformers.lora.batched_lora import BatchedLora
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.sampling import Sampler, best_tokens

Output = tuple[Row, StepOutput]
#: transformers 5.17 allocates up to two blocks more than a request fills; one is for the extra
#: step.
_SPARE_PAGES = 3


class StepOptions(NamedTuple):
    """Options of decode steps; with `ahead`, a step starts before the last one's tokens arrive."""

    kernel: Kernel
    context: int  # maximum tokens of a request
    graphs: bool
    ahead: bool
    speculator: Speculator | None = None

    @property
    def draft(self) -> DraftProposer | None:
        """Return the draft model, if that makes the proposals."""
        proposer = self.speculator and self.speculator.proposer
        return proposer if isinstance(proposer, DraftProposer) else None


@dataclass(slots=True)
class _Verified:
    """A row in a step that verifies proposed tokens."""

    slot: BatchSlot
    first: int  # place of its last token among those of the step
    proposed: Sequence[int]
    accepted: int = 0


class InflightStep(NamedTuple):
    """A step that has been started, whose tokens are on their way to the host."""

    running: list[BatchSlot]
    tokens: Tensor
    arrived: Any  # torch.cuda.Event; None if they have arrived


class DecodeLoop:
    """Decoder of the rows in slots; `rows` are all running rows by key."""

    def __init__(
        self,
        model: Any,
        made: Any,
        rows: MutableMapping[str, Row],
        slots: int,
        options: StepOptions,
        mixing: BatchedLora,
    ) -> None:
        """Use the library's batch processor `made`; `mixing` adds the rows' adapters.

        Raises ValueError for an unknown cache.
        """
        self._mixing = mixing
        self._scheduler = made.scheduler
        self._rows = rows
        self._options = options
        self.pages = Pages(made.cache, made.scheduler)
        device = model.device
        head = model.get_output_embeddings() or model.get_input_embeddings()
        self._vocab_size = int(head.weight.shape[0])
        wide = -(-options.context // self.pages.size) + _SPARE_PAGES
        self._slots = BatchSlots(slots, wide, self.pages.trash, self._vocab_size, device)
        self._steps = SlotSteps(
            model, self.pages, self._slots, options.kernel, options.graphs, mixing
        )
        self._sampler = Sampler()
        pinned = device.type == "cuda"
        self._heard = [torch.zeros(slots, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._inflight: InflightStep | None = None
        self._watched: set[str] = set()
        self._speculator = options.speculator
        if options.draft is not None:
            options.draft.attach_cache(self.pages, self._slots)

    # ---- participants

    @property
    def seated(self) -> MutableMapping[str, BatchSlot]:
        """Return the slots by key; the library's scheduler must not run these requests."""
        return self._slots.taken

    @property
    def how(self) -> str:
        """Return a short description for people."""
        how = self._steps.how
        return how if self._speculator is None else f"{how}, {self._speculator.how}"

    def record_graphs(self) -> None:
        """Record the CUDA graphs of all steps."""
        self._steps.record_graphs()
        if self._options.draft is not None:
            step_s = self._steps.time_step(device_sampling.CHOOSING[0])
            self._options.draft.record_graphs(step_s)

    def list_recordings(self, adapter: Adapter) -> list[Callable[[], None]]:
        """Return the recordings of all steps with adapters, each to be run between two steps.

        Those that are there already take no time; others would be recorded at their first use.
        """
        if not (self.uses_graphs and adapter.factors and self._mixing.fits_slots(adapter)):
            return []
        return [
            partial(self._steps.record_step, size, mode, [adapter])
            for size, mode in self._steps.list_steps()
        ]

    @property
    def uses_graphs(self) -> bool:
        return self._steps.graphs.on

    def admit_rows(self) -> None:
        """Give slots to all decoding rows; one whose adapter has its own model has none."""
        for key, state in self._scheduler.active_requests.items():
            row = self._rows.get(key)
            if row is None or key in self.seated:
                continue
            if row.adapter is not None and not self._mixing.fits_slots(row.adapter):
                continue
            if state.status == RequestStatus.DECODING and state.position_offset == row.length - 1:
                kind = device_sampling.classify_row(row)
                self._slots.assign(row, state, kind, self._pages_of(key), self.pages.size)
                if device_sampling.needs_host(row, self._vocab_size):
                    self._watched.add(key)

    def free_slot(self, key: str) -> None:
        """Free the slot of a cancelled row; the output of its running step is discarded."""
        self._slots.free_slot(key)
        self._watched.discard(key)
        if self._speculator is not None:
            self._speculator.forget_row(key)

    def return_rows(self) -> None:
        """Return all rows to the library; no step may be running."""
        for key, slot in list(self.seated.items()):
            slot.update_state()
            self.free_slot(key)

    def close(self) -> None:
        """Wait for the running step on the device, before the cache is freed."""
        if self._inflight is not None and self._inflight.arrived is not None:
            self._inflight.arrived.synchronize()
        self._inflight = None
        if self._speculator is not None:
            self._speculator.proposer.close()

    # ---- steps

    def step(self) -> list[Output]:
        """Start a step, and return the output of the one before.

        Without room for the step, all rows are returned to the library, which then frees some.
        """
        if self._speculator is None:
            return self._step()
        rows, began_s = len(self.seated), time.perf_counter()
        outputs = self._step()
        tokens = sum(len(output.token_ids) for _, output in outputs)
        self._speculator.note_step(rows, tokens, time.perf_counter() - began_s)
        return outputs

    def _step(self) -> list[Output]:
        self._watched = {
            key
            for key in self._watched
            if device_sampling.needs_host(self.seated[key].row, self._vocab_size)
        }
        outputs: list[Output] = []
        proposals: dict[str, list[int]] = {}
        if self._watched or self._is_promising():
            outputs = self.finish_step()
            if not self.seated:
                return outputs
            proposals = self._find_proposals()
        if not self._make_room():
            return outputs + self._run_dry()
        if self._watched or proposals:
            return outputs + self._step_and_wait(proposals)
        before, self._inflight = self._inflight, self._start_step()
        outputs += self._settle_step(before)
        return outputs + ([] if self._options.ahead else self.finish_step())

    def finish_step(self) -> list[Output]:
        """Return the output of the running step, if any."""
        inflight, self._inflight = self._inflight, None
        return self._settle_step(inflight)

    def _is_promising(self) -> bool:
        """Return whether to wait for the running step, since there are likely to be proposals."""
        if self._speculator is None:
            return False
        return self._speculator.is_promising(self._seated_rows, self._slots.count)

    @property
    def _seated_rows(self) -> list[Row]:
        return [slot.row for slot in self.seated.values()]

    def _find_proposals(self) -> dict[str, list[int]]:
        if self._speculator is None:
            return {}
        return self._speculator.make_proposals(self._seated_rows, self._slots.count)

    def _step_and_wait(self, proposals: Mapping[str, Sequence[int]]) -> list[Output]:
        """Run a step that verifies proposals, or whose tokens the host chooses; none is running."""
        proposals = self._fit_into_pages(proposals)
        total = len(self.seated) + sum(map(len, proposals.values()))
        size = self._steps.fit_size(total)
        spans = self._slots.lend(proposals, size)
        slots = list(self.seated.values())
        watched = bool(self._watched)
        mode = device_sampling.FREE if watched else self._find_mode()
        owners = zip(slots, spans, strict=True)
        adapters = [one.row.adapter for one, span in owners for _ in range(span)]
        self._steps.run_slots(size, mode, spans, adapters)
        chosen = [] if watched else self._steps.chosen[:total].tolist()
        firsts = accumulate(spans, initial=0)
        verified = [
            _Verified(slot, first, proposals.get(slot.row.key, ()))
            for slot, first in zip(slots, firsts, strict=False)
        ]
        outputs: list[Output] = []
        going = verified
        while going:
            if watched:
                tokens = self._choose_on_host(going)
            else:
                tokens = [chosen[one.first + one.accepted] for one in going]
            going = [
                one
                for one, token in zip(going, tokens, strict=True)
                if self._push_verified(one, token, outputs)
            ]
        for one in verified:
            one.slot.started = one.slot.done
            self._note_proposal(one)
        return outputs

    def _choose_on_host(self, going: list[_Verified]) -> list[int]:
        logits = self._steps.logits
        assert logits is not None
        places = [one.first + one.accepted for one in going]
        scores = logits[torch.tensor(places, device=logits.device)]
        rows = [one.slot.row for one in going]
        for row, own in zip(rows, scores, strict=True):
            if row.noted is not None:
                row.noted.append(own.clone())
        self._sampler.apply(rows, scores)
        return best_tokens(scores).tolist()

    def _push_verified(self, one: _Verified, token: int, outputs: list[Output]) -> bool:
        """Push a row's next token; return whether it is the proposed one, so that another follows.

        NaN after proposed tokens is left to the step that finds it after the row's own.
        """
        slot, at = one.slot, one.accepted
        row = slot.row
        if at and (token == NOT_A_NUMBER or row.broken):
            row.broken, row.scores = False, None
            if row.noted:
                row.noted.pop()
            return False
        output = self._push_token(slot, token)
        if at and not output.error:
            join_outputs(next(made for owner, made in reversed(outputs) if owner is row), output)
        else:
            outputs.append((row, output))
        if not slot.taken or at == len(one.proposed) or one.proposed[at] != token:
            return False
        one.accepted += 1
        return True

    def _note_proposal(self, one: _Verified) -> None:
        if self._speculator is not None:
            self._speculator.note_proposal(one.slot.row.key, len(one.proposed), one.accepted)

    def _fit_into_pages(self, proposals: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
        """Reserve pages for proposals; shorten those for which there are none."""
        fitting = {}
        for key, proposed in proposals.items():
            slot = self.seated[key]
            if slot.started + 1 + len(proposed) > slot.room:
                slot.state.position_offset = slot.started
                if self.pages.reserve(slot.state, 1 + len(proposed)):
                    self._update_pages(slot)
            if kept := proposed[: slot.room - slot.started - 1]:
                fitting[key] = kept
        return fitting

    def _start_step(self) -> InflightStep | None:
        """Start a step; return None if every slot's request ends with the running step."""
        if all(_is_ending(slot) for slot in self.seated.values()):
            return None
        running = self._run_slots(self._find_mode())
        self._heard.reverse()
        reach = max(slot.index for slot in running) + 1
        heard = self._heard[0][:reach].copy_(self._steps.chosen[:reach], non_blocking=True)
        arrived = None
        if heard.is_pinned():
            cuda: Any = torch.cuda  # untyped in part
            arrived = cuda.Event()
            arrived.record()
        return InflightStep(running, heard, arrived)

    def _find_mode(self) -> SamplingMode:
        return device_sampling.find_mode({slot.kind for slot in self.seated.values()})

    def _settle_step(self, inflight: InflightStep | None) -> list[Output]:
        if inflight is None:
            return []
        if inflight.arrived is not None:
            inflight.arrived.synchronize()
        tokens = inflight.tokens.tolist()
        outputs = []
        for slot in inflight.running:
            if slot.taken:
                outputs.append((slot.row, self._push_token(slot, tokens[slot.index])))
                self._note_proposal(_Verified(slot, 0, ()))
        return outputs

    def _push_token(self, slot: BatchSlot, token: int) -> StepOutput:
        row = slot.row
        slot.done += 1
        output = row.push(token)
        output.cached_tokens = row.cached_tokens or 0
        if slot.done % self.pages.size == 0:
            slot.update_state()
            self.pages.complete(slot.state)
            self._update_pages(slot)  # a block may have been exchanged for an equal one
        if output.finish or output.error:
            self._end_row(slot)
        return output

    def _end_row(self, slot: BatchSlot) -> None:
        key = slot.row.key
        self.free_slot(key)
        self._scheduler.finish_request(key)
        self._scheduler.block_new_requests = False
        slot.state.status = RequestStatus.FINISHED
        del self._rows[key]

    # ---- room

    def _make_room(self) -> bool:
        for slot in self.seated.values():
            if slot.started < slot.room or _is_ending(slot):
                continue
            slot.state.position_offset = slot.started
            if not self.pages.reserve(slot.state):
                return False
            self._update_pages(slot)
        return True

    def _run_dry(self) -> list[Output]:
        outputs = self.finish_step()
        self.return_rows()
        return outputs

    def _update_pages(self, slot: BatchSlot) -> None:
        pages = self._pages_of(slot.row.key)
        slot.room = len(pages) * self.pages.size
        self._slots.set_pages(slot, pages)

    def _pages_of(self, key: str) -> list[int]:
        return [block * self.pages.stride for block in self.pages.blocks(key)]

    # ---- on the device

    def _run_slots(self, mode: SamplingMode) -> list[BatchSlot]:
        """Start a step of all slots, and return these."""
        self._slots.upload()
        running = list(self.seated.values())
        adapters: list[Adapter | None] = []
        if self._mixing.has_factors:
            adapters = [None] * self._slots.reach
            for slot in running:
                adapters[slot.index] = slot.row.adapter
        size = bucket_size(self._slots.reach, self._slots.count)
        self._steps.run_slots(size, mode, adapters=adapters)
        for slot in running:
            slot.started += 1
        return running


def _is_ending(slot: BatchSlot) -> bool:
    """Return whether the request's last token is being computed."""
    return slot.row.remaining <= slot.started - slot.done
