"""Continuous batching with transformers' own processor, stepped by servekit.

The library offers a manager with its own thread. Here only the manager's parts (paged cache,
scheduler, prefix sharing, model runner) are used, and the three steps of its loop are called
directly: `prepare_next_batch`, `_generation_step`, `update_batch`. The library's thread is not used
because

- it dies of one bad request and takes all others with it; between steps of our own, adding and
  cancelling cannot race with a step, and stopping with work in flight just means returning;
- it delivers each request's whole output again on every step, through a queue; here the new token
  is read from the request's state;
- a chunk of a long prompt has no output, but is progress, and is counted as such here;
- `add_request` blocks for ten seconds on a full queue, and returns None when the loop is dead.

The library's batches are synchronous and without CUDA graphs. The library reads prompts and runs
adapters that have a model of their own. If requested, servekit runs the steps that generate one
token per request itself (`decode.decode_loop`). The two take turns, so that neither a long prompt
nor many decoding requests delay the others.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from servekit.engines.api.base import Job, StepOutput
from servekit.engines.api.speculation import Counts
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers import prompt_scores
from servekit.engines.transformers.batching import batch_processor, kv_cache, paged_attention
from servekit.engines.transformers.batching import scheduler as groups
from servekit.engines.transformers.batching.kv_cache import CachePlan
from servekit.engines.transformers.decode.decode_loop import DecodeLoop, StepOptions
from servekit.engines.transformers.lora.adapter import Adapter
from servekit.engines.transformers.lora.batched_lora import Part
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner import CausalRunner
from servekit.engines.transformers.tensor_parallel.controller import Ranks
from servekit.engines.transformers.vision.batched_images import BatchedImages, ImagePart
from servekit.protocol.messages import SamplingParams

log: Any = structlog.get_logger(__name__)

# The library's logger reports every cache that it creates, in its own format.
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)

#: Output tokens for which there must be room before a request is admitted. Most requests end before
#: their limit, so room for only a part of it is reserved; if the cache fills up anyway, the library
#: preempts the newest request and runs it again later.
ADMISSION_TOKENS = 128
#: Prompts of each step of the warm-up.
_WARM_UP_ROWS = 8
#: Maximum number of consecutive steps that schedule nothing although there is work.
PATIENCE = 3


class SchedulerStuck(RuntimeError):
    """Raised if the library's scheduler finds nothing to run although requests are waiting."""


class ContinuousRunner(CausalRunner):
    """Runner of many rows at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: CachePlan,
        *,
        by_request: bool,
        ranks: Ranks | None = None,
        decode: StepOptions | None = None,
    ) -> None:
        """Set up the cache; `decode` needs `by_request` and a single rank."""
        super().__init__(model)
        self._model = model
        self.plan = plan
        self._ranks = ranks
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self.plain_attention = str(model.config._attn_implementation)
        self._manager = batch_processor.make_manager(
            model, plan, ranks=1 if ranks is None else ranks.size
        )
        self._sampling = batch_processor.SamplingHook()
        self._manager.logit_processor = self._sampling
        self._manager.output_router = batch_processor.Discard()
        if by_request:
            model.set_attn_implementation(paged_attention.NAME)
        self.by_request = by_request
        self._packed = by_request and ranks is None and _has_packed_kernel(model)
        self.attention = str(model.config._attn_implementation)
        self._epochs = groups.Epochs()
        self._rows: dict[str, Row] = {}
        self._sampling.rows = self._rows
        self._read_images: Callable[[Row], StepOutput | None] | None = None
        self._images: BatchedImages | None = None
        self._idle_steps = 0
        self._step_options = decode
        self._decoder: DecodeLoop | None = None
        self._reading = False  # the last step was the library's
        self._full = False  # the library cannot begin a request until one ends
        self._processor: Any = None
        self._create_pages()
        self.capacity = batch_processor.request_capacity(self._pages, plan)

    @property
    def _pages(self) -> Any:
        """Return the library's cache."""
        return self._processor.cache

    # ---- used by the engine

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def decodes(self) -> str:
        """Return a short description of our decoding; "" if the library decodes."""
        return "" if self._decoder is None else self._decoder.how

    @property
    def kv_used(self) -> float:
        rows = list(self._rows.values())
        return min(1.0, sum(row.length for row in rows) / self.capacity)

    @property
    def speculated(self) -> Counts:
        """Return the numbers of tokens that were proposed and accepted so far."""
        options = self._step_options
        return options.speculator.counts if options and options.speculator else Counts()

    @property
    def shares_prefixes(self) -> bool:
        """Return whether prompt prefixes are cached; the library requires support in all layers."""
        return bool(getattr(self._processor.cache, "use_prefix_sharing", False))

    def tensors(self) -> Iterable[Tensor]:
        yield from super().tensors()
        if self._step_options is not None and self._step_options.draft is not None:
            yield from self._step_options.draft.tensors()

    def install_adapter(self, adapter: Adapter) -> None:
        super().install_adapter(adapter)
        if adapter.model is not None and self._images is not None:
            self._images.attach(adapter.model)

    def list_recordings(self, adapter: Adapter) -> list[Callable[[], None]]:
        return [] if self._decoder is None else self._decoder.list_recordings(adapter)

    def remove_adapter(self, adapter: Adapter) -> None:
        super().remove_adapter(adapter)
        self._sampling.drop_rows()

    def cancel(self, row: Row) -> None:
        """Drop a row now: its slot and blocks are free for the next step."""
        self._full = False
        if self._decoder is not None:
            self._decoder.free_slot(row.key)
        if self._rows.pop(row.key, None) is None:
            self._withdraw(row)
            return
        scheduler = self._processor.scheduler
        scheduler.set_request_cancellation(row.key)
        for state in scheduler.clear_cancelled_requests():
            self._processor.offloading_manager.free_request_cpu_cache(state)
        # The library lifts this block only when a request finishes, but not when it is cancelled.
        scheduler.block_new_requests = False

    @torch.no_grad()
    def step(self) -> list[tuple[Row, StepOutput]]:
        """Run one forward pass and return its output. Any exception ends the engine."""
        refused = self._admit_waiting()
        outputs = self._run_step()
        if any(row.broken or row.alone for row, _ in outputs):
            outputs = [(row, output) for row, output in outputs if not self._run_again(row, output)]
        return refused + outputs

    def _run_again(self, row: Row, output: StepOutput) -> bool:
        """Restart a row alone if its logits are NaN, which another row may have caused.

        With attention over the whole batch, one row's NaN reaches every row of that step, and a
        block of the prefix cache may hold NaN. A row fails only if its logits are NaN when it runs
        alone.
        """
        alone, row.alone = row.alone, 0
        if not row.broken:
            return False
        number = self._epochs.end_epoch(row)
        if alone:
            return False
        row.run_alone(number, output)
        self.add_first(row)
        return True

    def _run_step(self) -> list[tuple[Row, StepOutput]]:
        decoder = self._decoder
        if decoder is None:
            return self._step_of_library()
        if decoder.seated and (self._reading or self._full or not self._has_others(decoder)):
            self._reading = False
            return self._decode_step(decoder)
        outputs = decoder.finish_step()
        outputs += self._step_of_library()
        self._reading = True
        decoder.admit_rows()
        return outputs

    def _decode_step(self, decoder: DecodeLoop) -> list[tuple[Row, StepOutput]]:
        if self._images is not None:
            self._images.clear_layout()  # rows in the decode loop have read their images
        outputs = decoder.step()
        self._full &= not any(output.finish or output.error for _, output in outputs)
        return outputs

    def _has_others(self, decoder: DecodeLoop) -> bool:
        """Return whether there are requests that the library has to run."""
        scheduler = self._processor.scheduler
        known = len(scheduler.active_requests) + len(scheduler.waiting_requests)
        return bool(known > len(decoder.seated))

    def _step_of_library(self) -> list[tuple[Row, StepOutput]]:
        processor = self._processor
        if not processor.prepare_next_batch():
            self._be_patient()
            return []
        self._idle_steps = 0
        model = self._lay_out()
        self._let_inputs_arrive()
        if spans := self._find_spans():
            hidden = prompt_scores.Hidden(model)
            with hidden.kept():
                processor._generation_step(model)
            prompt_scores.score_spans(hidden, spans, self._vocab_size)
        else:
            processor._generation_step(model)
        processor.update_batch()
        return self._collect_outputs()

    def _find_spans(self) -> list[prompt_scores.Span]:
        """Return the places in the batch where log probabilities of prompts are requested."""
        found, at = [], 0
        for future in self._processor.inputs_and_outputs.requests_in_batch:
            row, count = self._rows[future.state.request_id], future.query_length
            past = future.state.position_offset - count
            if one := prompt_scores.find_span(row, at, past, count):
                found.append(one)
            at += count
        return found

    def take_images(self, read: Callable[[Row], StepOutput | None]) -> None:
        """Let rows have images, which `read` reads when a row begins, and puts into `row.images`.

        It returns the row's end if they cannot be read. A row that is left without an end and
        without images has gone to another runner.
        """
        self._read_images, self._images = read, BatchedImages(self._model)

    def reads_no_images(self) -> bool:
        """Return whether the step that is laid out has no images."""
        return self._images is None or not self._images.laid_out

    def logits_of(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Run rows to completion; return by key all their logits, float32 [tokens, vocabulary]."""
        seen: dict[str, list[Tensor]] = {row.key: [] for row in rows}
        for row in rows:
            row.noted = seen[row.key]
            self.add(row)
        while self.running or self.waiting:
            self.step()
        return {key: torch.stack(logits) for key, logits in seen.items()}

    def make_pages(self) -> None:
        self._create_pages()
        self.record_graphs()

    def _create_pages(self) -> None:
        ranks = self._ranks
        with ranks.paging(self.plan, self.attention) if ranks else contextlib.nullcontext():
            made = batch_processor.create_processor(self._manager)
        made.scheduler.rows = self._rows
        groups.keep_prefixes_apart(made.cache, self._rows, self._epochs)
        self._processor = made
        if self._step_options is not None:
            self._decoder = DecodeLoop(
                *(self._model, made, self._rows, self.plan.slots, self._step_options, self.mixing)
            )
            made.scheduler.elsewhere = self._decoder.seated
            made.scheduler.ample = self._decoder.pages.is_ample

    @torch.no_grad()
    def record_graphs(self) -> None:
        """Record the CUDA graphs of our decode steps, so that no request waits for that."""
        if self._decoder is not None and self._decoder.uses_graphs:
            self._decoder.record_graphs()

    def warm_up(self, context: int) -> None:
        """Read prompts of several sizes, so that no request waits for kernels to be loaded.

        `context` is the maximum length of a request in tokens.
        """
        size = min(self.plan.batch_tokens, self.capacity // 2, _WARM_UP_ROWS * (context - 1))
        while size >= _WARM_UP_ROWS * 2:
            rows = [self._warm_up_row(size, index) for index in range(_WARM_UP_ROWS)]
            try:
                for row in rows:
                    self.add(row)
                while self.running or self.waiting:
                    self.step()
            except torch.OutOfMemoryError as error:  # smaller requests may never need so much
                log.warning("warm_up_failed", tokens=size, reason=str(error))
                for row in rows:
                    self.cancel(row)
            size //= 2

    def _warm_up_row(self, size: int, index: int) -> Row:
        first = size + index  # a beginning of its own, which no cached block has
        prompt = [(first + at) % self._vocab_size for at in range(size // _WARM_UP_ROWS)]
        job = Job(-1 - index, prompt, SamplingParams(max_tokens=1))
        return Row(f"warm-up {first}", job, Sampling(0.0), frozenset(), 1)

    def drop_pages(self) -> None:
        self.mixing.clear_layout()
        if self._images is not None:
            self._images.clear_layout()
        self._sampling.drop_rows()
        self._free_cache()
        if self._ranks is not None:
            self._ranks.drop_pages()

    def close(self) -> None:
        self._rows.clear()
        self._waiting.clear()
        self._free_cache()

    def _free_cache(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
        self._processor = None
        self._manager.batch_processor = None
        gc.collect()

    # ---- inside a step

    def _admit_waiting(self) -> list[tuple[Row, StepOutput]]:
        """Begin the waiting rows that there is room for; return the ends of those refused.

        The images of one row are read in a step, so that the others do not wait for many.
        """
        refused = []
        reading = False
        while self._waiting and len(self._rows) < self.plan.slots:
            row = self._waiting[0]
            promised = sum(_promised_to(other) for other in self._rows.values())
            if self._rows and promised + _promised_to(row) > self.capacity:
                break
            unread = row.job.media is not None and row.images is None
            if unread and reading:
                break
            self._waiting.popleft()
            if unread and self._read_images is not None:
                reading = True
                if (output := self._read_images(row)) is not None:
                    refused.append((row, output))
                if row.images is None:
                    continue
            self._rows[row.key] = row
            self._processor.scheduler.add_waiting_request(_request_state(row))
        return refused

    def _be_patient(self) -> None:
        if self._decoder is not None and self._decoder.seated:
            self._full = True
            return
        self._idle_steps += bool(self._rows)
        if self._idle_steps > PATIENCE:
            raise SchedulerStuck("the scheduler does not run any of the waiting requests")

    def _lay_out(self) -> Any:
        """Set the layout of the batch; return the model that runs it."""
        batch = self._processor.inputs_and_outputs.requests_in_batch
        queries = [future.query_length for future in batch]
        pasts = [future.state.position_offset - future.query_length for future in batch]
        if self.by_request:
            self._pages.layout = paged_attention.Layout.build(
                pasts, queries, self._model.device, packed=self._packed
            )
        adapters = [self._rows[future.state.request_id].adapter for future in batch]
        parts = zip(adapters, pasts, queries, strict=True)
        self.mixing.lay_out([Part(*part) for part in parts])
        if self._images is not None:
            images = [self._rows[future.state.request_id].images for future in batch]
            placed = zip(images, pasts, queries, strict=True)
            self._images.lay_out([ImagePart(*part) for part in placed])
        own = None if adapters[0] is None else adapters[0].model
        return self._model if own is None else own

    def _let_inputs_arrive(self) -> None:
        """Make the library's stream wait for the inputs, created on the current stream."""
        stream = self._processor.inputs_and_outputs.compute_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())

    def _collect_outputs(self) -> list[tuple[Row, StepOutput]]:
        outputs = []
        for future in self._processor.inputs_and_outputs.requests_in_batch:
            if future.has_new_token:
                row = self._rows[future.state.request_id]
                output = row.push(future.state.generated_tokens[-1])
                output.cached_tokens = row.cached_tokens or 0
                if row.prompt_scores:
                    row.tell_prompt(output)
                if output.finish or output.error:
                    self._finish_row(row, future.state)
                outputs.append((row, output))
        return outputs

    def _finish_row(self, row: Row, state: RequestState) -> None:
        if state.status == RequestStatus.FINISHED:
            del self._rows[row.key]
        elif row.ends_itself:
            self.cancel(row)
        else:
            raise RuntimeError("the library and the engine disagree on where a request ends")


def _has_packed_kernel(model: PreTrainedModel) -> bool:
    shape = kv_cache.shape_of(model.config.get_text_config(), model.dtype.itemsize)
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    return paged_attention.has_packed_kernel(shape.heads, shape.kv_heads, shape.head_dim, like)


def _promised_to(row: Row) -> int:
    return row.length + min(row.remaining, ADMISSION_TOKENS)


def _request_state(row: Row) -> RequestState:
    """Return the library's record of a request, with another worker's tokens as prompt."""
    return RequestState(
        request_id=row.key,
        initial_tokens=row.context,
        max_new_tokens=row.remaining,
        eos_token_id=sorted(row.eos),
    )
