"""Control of the other ranks by rank 0.

All calls come from one thread at a time: first the loading one, then the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servekit.engines.model_files.model_kind import ModelKind
from servekit.engines.transformers.batching.kv_cache import CachePlan
from servekit.engines.transformers.tensor_parallel import (
    messages,
    plan,
    process_group,
    tensor_transfer,
)
from servekit.engines.transformers.tensor_parallel.rank_processes import (
    Children,
    end_process,
)
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

#: Time between the end of a rank's connections, seen by rank 0's step, and of its lifeline.
_DYING_S = 0.1
#: How long the worker may take to exit after a rank's death.
_EXIT_S = 3.0


class Ranks:
    """Ranks 1 to `size` - 1 of a replica whose rank 0 is this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.size = spec.gpus
        self.free_bytes: int | None = None  # minimum over the other ranks, once reported
        #: Whether the batch's next pass is of tokens alone, which all ranks embed as they are.
        self.runs_tokens: Callable[[], bool] = lambda: False
        self._running: messages.Runs | None = None  # in all ranks now
        self._spec = spec
        self._device = process_group.device_of(spec, 0)
        try:
            self._children = Children(self.size)
        except OSError as error:
            message = f"The other ranks of {spec.model} cannot be started: {error.strerror}."
            raise LoadError(message, permanent=False) from error

    @property
    def pids(self) -> list[int]:
        return self._children.pids

    @contextmanager
    def loading(self, folder: Path, threads: int, kind: ModelKind = "generate") -> Iterator[None]:
        """Load the other ranks' shards while the block loads rank 0's. Raises LoadError."""
        store = self._children.store
        self._send_order(messages.Begin(self._spec, str(folder), store, threads, kind))
        try:
            process_group.join_group(self._device, 0, self.size, store)
        except Exception as error:  # the others would wait for rank 0 forever
            self.close()
            raise LoadError(f"The ranks do not come together: {error}") from error
        with self._require_answers():
            yield

    def report_death(self, died: Callable[[str], None]) -> None:
        """Call `died` with the reason for a rank's death, instead of ending the process at once.

        The process is still ended if it does not exit by itself.
        """

        def end_with_ranks(reason: str) -> None:
            died(reason)
            if not self._children.await_end(_EXIT_S):
                end_process(reason)

        self._children.died = end_with_ranks

    @property
    def has_dead_rank(self) -> bool:
        """Return whether a rank has died, which makes rank 0's step fail with another error."""
        return self._children.dying.wait(_DYING_S)

    @property
    def left_behind(self) -> bool:
        """Return whether rank 0 has failed in a pass: no other can follow, as the ranks are in it.

        To be asked between passes.
        """
        return self._running is not None

    def mirror_forward(self, model: Any, *, reads_media: bool) -> None:
        """Run every forward pass of rank 0's model in all ranks from now on.

        A model that `reads_media` does so in rank 0 alone, whose other ranks run the parts that are
        shared, with rank 0's arguments: its input embedding, decoder and head. The parts of its
        copies (`clone_modules`) run in all ranks, too. A batch of tokens alone runs as a whole.
        """

        def begin_model(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._require_in_step()
            if reads_media and not (module is model and self.runs_tokens()):
                return
            if args:
                raise TypeError("the ranks take a model's arguments by name only")
            self._run_forward("model", module, args, kwargs)

        def end_model(module: Any, args: Any, out: Any) -> None:
            self._running = None

        model.register_forward_pre_hook(begin_model, with_kwargs=True)
        model.register_forward_hook(end_model)
        if reads_media:
            for what, part in plan.shared_parts(model).items():
                self._mirror_part(what, part)

    def _mirror_part(self, what: messages.Runs, part: Any) -> None:
        def begin_part(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._running is None:  # else it is a part of what runs
                self._run_forward(what, module, args, kwargs)

        def end_part(module: Any, args: Any, out: Any) -> None:
            if self._running == what:
                self._running = None

        part.register_forward_pre_hook(begin_part, with_kwargs=True)
        part.register_forward_hook(end_part)

    @contextmanager
    def paging(self, plan: CachePlan, attention: str) -> Iterator[None]:
        """Create the other ranks' KV caches while the block creates rank 0's.

        If one fails, no cache is left. Raises the block's exception, and MemoryError if a rank has
        no room.
        """
        with self._order_all(messages.MakePages(plan, attention), undo=messages.DropPages()):
            yield

    def drop_pages(self) -> None:
        with self._order_all(messages.DropPages()):
            pass

    @contextmanager
    def falling_asleep(self) -> Iterator[None]:
        """Put the other ranks to sleep while the block does rank 0; on failure all are awake."""
        with self._order_all(messages.FallAsleep(), undo=messages.WakeUp()):
            yield

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Wake the other ranks while the block wakes rank 0; on failure all are asleep."""
        with self._order_all(messages.WakeUp(), undo=messages.FallAsleep()):
            yield

    def close(self) -> None:
        """End the other ranks, and return once they are reaped."""
        self._children.close()
        process_group.leave_group()

    # ---- messages

    def _run_forward(
        self, what: messages.Runs, module: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        arguments, tensors = tensor_transfer.pack_arguments(args, kwargs)
        whole = tensor_transfer.join_tensors(tensors, self._device)
        config = getattr(module, "config", None)
        attention = "" if config is None else str(config._attn_implementation)
        forms = tensor_transfer.tensor_forms(tensors)
        self._send_order(messages.Run(what, attention, arguments, forms, len(whole)))
        self._running = what
        process_group.broadcast_tensor(whole)

    def _require_in_step(self) -> None:
        if self.left_behind:
            raise RuntimeError(f"rank 0 has failed in a pass of the {self._running}")

    def _send_order(self, order: messages.ToRank) -> None:
        self._require_in_step()
        for channel in self._children.channels:
            messages.send_message(channel, order)

    @contextmanager
    def _order_all(
        self, order: messages.ToRank, undo: messages.ToRank | None = None
    ) -> Iterator[None]:
        """Carry out a command on all ranks; if one fails, undo it on the others."""
        self._send_order(order)
        with self._require_answers(undo):
            yield

    @contextmanager
    def _require_answers(self, undo: messages.ToRank | None = None) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._await_answers()
            self._undo_order(undo)
            raise
        failures = self._await_answers()
        if failures:
            self._undo_order(undo)
            told = "; ".join(failure.message for failure in failures)
            if any(failure.out_of_memory for failure in failures):
                raise MemoryError(told)
            raise LoadError(told, permanent=any(failure.permanent for failure in failures))

    def _undo_order(self, undo: messages.ToRank | None) -> None:
        if undo is not None:
            self._send_order(undo)
            self._await_answers()

    def _await_answers(self) -> list[messages.Failed]:
        answers = [messages.receive_answer(channel) for channel in self._children.channels]
        done = [answer.free_bytes for answer in answers if isinstance(answer, messages.Done)]
        self.free_bytes = min(done, default=None)
        return [answer for answer in answers if isinstance(answer, messages.Failed)]


def threads_each(threads: int, size: int) -> int:
    """Return the torch threads of one rank, if all together have `threads`."""
    return max(1, threads // size)
