"""The transformers engine: any causal language model that the library can load, and embeddings.

Requests share batches through `continuous.ContinuousRunner` where the model can, and run one by
one through `static.StaticRunner` where it cannot. A folder that says how hidden states become a
vector is an embedding model, run by `embedding.EmbeddingRunner`. In any case the loop is here, in a
thread of its own: take what was submitted and cancelled, run one step, emit what it brought, all of
it at once. Nothing but this thread touches the runner.

Should a step raise, the loop cannot be trusted any more: every request under way gets an error,
`fatal` is set, and the worker is expected to exit and be started again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

from msgspec import structs
from torch import Tensor

from servekit.engines import embedding, loading, preparing
from servekit.engines.adapters.shelf import Shelf
from servekit.engines.adapters.skeleton import BaseChanged
from servekit.engines.assembly import CausalRunner, Runner, eos_ids, sampling_defaults
from servekit.engines.base import EmbedJob, Emit, Engine, Job, Load, Report, StepOutput
from servekit.engines.between import Between
from servekit.engines.choosing import resolve
from servekit.engines.codec import TokenizerCodec
from servekit.engines.dialect import find_dialect, takes_tools
from servekit.engines.grammar import Constraint
from servekit.engines.guard import Limits, check, check_inputs
from servekit.engines.pieces import Pieces
from servekit.engines.rest import Rest
from servekit.engines.rows import Row
from servekit.engines.spread import plan
from servekit.engines.spread.leader import Ranks
from servekit.errors import EngineFailed, LoadError, RequestError, Unsupported
from servekit.wire.adapters import AdapterInfo, AdapterSpec
from servekit.wire.dialects import markers
from servekit.wire.messages import Capability, Dialect, Grammar, ModelInfo, WorkerSpec

log = logging.getLogger(__name__)

#: How long `close` waits for the step that is running; the thread ends with its process anyway.
CLOSE_TIMEOUT_S = 5.0
#: What every causal model is served with.
SERVES: tuple[Capability, ...] = (
    *("generate", "tokenize", "detokenize", "logprobs", "logit_bias", "penalties", "min_p"),
)
EMBEDS_ONLY = "This model makes embeddings only."
NO_GRAMMAR = "This model's tokenizer is of a kind that llguidance cannot read."


Request = Row | embedding.EmbedRow


class TransformersEngine(Engine):
    """See the module's docstring; options are `config.schema.TransformersOptions`."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.fatal: Exception | None = None
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._rows: dict[int, Request] = {}
        self._runner: Runner[Any]
        self._serial = count()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._shelf: Shelf | None = None
        self._ranks: Ranks | None = None
        self._between: Between
        self._rest: Rest
        self._progress_at = time.monotonic()

    # ---------------------------------------------------------------- loading

    @classmethod
    def prepare(cls, spec: WorkerSpec) -> None:
        preparing.prepare(spec)

    def load(self, report: Report) -> ModelInfo:
        loaded = loading.load(self.spec, report)
        self._runner, self._ranks = loaded.runner, loaded.ranks
        self.codec: TokenizerCodec = loaded.codec
        self.vocab_size = loaded.vocab_size
        self._limits = Limits(self.vocab_size, loaded.info.max_context)
        self._between = Between(self, cast(CausalRunner, loaded.runner))
        bed = loading.bed(loaded, self.spec, self._tensors)
        self._rest = Rest(loaded.runner, bed, loaded.ranks)
        if isinstance(loaded.runner, embedding.EmbeddingRunner):
            return loaded.info
        return self._speaking(loaded)

    def _speaking(self, loaded: loading.Loaded) -> ModelInfo:
        """What a model that generates needs beside; returns what it can do."""
        model, tokenizer = loaded.model, loaded.tokenizer
        self._eos = eos_ids(model, tokenizer)
        stated = {name: value for name, value in self.spec.sampling.items() if value is not None}
        self._defaults = sampling_defaults(model) | stated
        self._pieces = Pieces(tokenizer)
        self._grammars = preparing.grammars(tokenizer, self.vocab_size, self._eos)
        dialect = self._dialect()
        info = structs.replace(loaded.info, serves=self._served(dialect), dialect=dialect)
        if plan.is_spread(self.spec):
            return info
        runner = cast(CausalRunner, loaded.runner)
        self._shelf = Shelf(model, loaded.attention, runner, self.spec, self._between)
        adapters, refused = self._shelf.load_all(self.spec.adapters)
        return structs.replace(info, adapters=adapters, refused_adapters=refused)

    def _dialect(self) -> Dialect:
        found = find_dialect(self.codec.template, self.spec.tool_parser, self.spec.reasoning_parser)
        known = self.codec.tokens_of(markers(found))
        tokens = [(text, token) for text, token in known.items() if token not in self._eos]
        return structs.replace(found, tokens=tuple(tokens))

    def _served(self, dialect: Dialect) -> tuple[Capability, ...]:
        grammar: tuple[Capability, ...] = ("grammar",) if self._grammars else ()
        read = dialect.tools or self.spec.tool_parser == "none"  # calls in the text, as wished
        told = read and takes_tools(self.codec.template)
        tools: tuple[Capability, ...] = ("tools",) if told else ()
        adapters: tuple[Capability, ...] = () if plan.is_spread(self.spec) else ("adapters",)
        return (*SERVES, *adapters, *grammar, *tools)

    # ---------------------------------------------------------------- the caller's side

    def start(self, emit: Emit) -> None:
        self._emit = emit
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def embed(self, job: EmbedJob) -> None:
        if not isinstance(self._runner, embedding.EmbeddingRunner):
            raise Unsupported("This model has no pooling to make embeddings with.", param="model")
        check_inputs(job, self._limits)
        self._take(embedding.EmbedRow(self._key(job.id), job))

    def submit(self, job: Job) -> None:
        if isinstance(self._runner, embedding.EmbeddingRunner):
            raise Unsupported(EMBEDS_ONLY, param="model")
        adapter = self._adapting().get(job.adapter) if job.adapter else None
        check(job, self._limits, adapter.virtual_tokens if adapter else 0)
        sampling = resolve(job.params, self._defaults, self.vocab_size)
        bound = job.constraint is not None
        if bound != (job.params.grammar is not None):
            raise ValueError("a job with a grammar comes with what `constrain` made of it")
        eos = self._eos if bound or not job.params.ignore_eos else frozenset()
        limit = job.params.max_tokens or 1
        row = Row(self._key(job.id), job, sampling, eos, limit, self._pieces.of)
        row.constraint = cast(Constraint | None, job.constraint)
        row.adapter = adapter
        self._take(row)

    def _key(self, job_id: int) -> str:
        return f"{job_id}#{next(self._serial)}"

    def _take(self, row: Request) -> None:
        with self._changed:
            if self.fatal is not None or self._closing:
                raise EngineFailed("The engine has stopped; the worker is being restarted.")
            if self._rest.asleep:
                raise EngineFailed("The model is asleep.")
            if row.job.id in self._rows:
                raise RequestError(f"Request id {row.job.id} is already in flight.")
            if not self._rows:
                self._progress_at = time.monotonic()  # what was idle until now is not late
            self._rows[row.job.id] = row
            self._post(lambda: self._add(row))

    def load_adapter(self, adapter: AdapterSpec) -> AdapterInfo:
        try:
            return self._adapting().load(adapter)
        except BaseChanged as error:  # this worker has to go
            self.post(partial(_throw, error))
            raise EngineFailed(str(error)) from error

    def unload_adapter(self, name: str) -> None:
        shelf = self._adapting()
        with self._changed:
            rows = [row for row in self._rows.values() if isinstance(row, Row)]
        if any(row.job.adapter == name for row in rows):
            raise RequestError(f"Requests with adapter {name!r} are under way.", param="lora_name")
        shelf.unload(name)

    def _adapting(self) -> Shelf:
        if self._rest.asleep:
            raise LoadError("The model is asleep; wake it first.", permanent=False)
        if self._shelf is None:
            why = plan.NO_ADAPTERS if plan.is_spread(self.spec) else EMBEDS_ONLY
            raise Unsupported(why, param="lora_name")
        return self._shelf

    def constrain(self, grammar: Grammar, emitted: Sequence[int]) -> Constraint:
        if self._grammars is None:
            raise Unsupported(NO_GRAMMAR, param=grammar.param)
        return self._grammars.constraint(grammar, emitted)

    def cancel(self, job_id: int) -> None:
        with self._changed:
            row = self._rows.pop(job_id, None)
            if row is not None:
                row.cancelled = True
                self._post(lambda: self._runner.cancel(row))

    def sleep(self) -> None:
        self._between.between_steps(self._rest.sleep)

    def wake(self) -> None:
        self._between.between_steps(self._rest.wake)

    def _tensors(self) -> Iterator[Tensor]:
        """What is on the device beside the model's own."""
        yield from self._runner.tensors()
        if self._shelf is not None:
            yield from self._shelf.tensors()

    def load_now(self) -> Load:
        runner, total = self._runner, len(self._rows)
        running = min(runner.running, total)
        age = time.monotonic() - self._progress_at if total else 0.0
        return Load(running, total - running, runner.kv_used if total else 0.0, age)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._ranks is not None:
            self._ranks.close()

    # ---------------------------------------------------------------- for `Between`

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def ended(self) -> bool:
        return self.fatal is not None or self._closing

    def post(self, command: Callable[[], None]) -> None:
        """Have something done in the engine's thread, before its next step."""
        with self._changed:
            self._post(command)

    def take_first(self, row: Row) -> None:
        """Run a private row, before all that wait."""
        with self._changed:
            self._rows[row.job.id] = row
            self._post(lambda: cast(CausalRunner, self._runner).add_first(row))

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._changed.notify()

    # ---------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        try:
            while self._await_work():
                self._step()
        except Exception as error:
            log.exception("the engine's loop has failed")
            self._fail(error)
        finally:
            self._runner.close()

    def _await_work(self) -> bool:
        """Carry out commands; wait until there is a step to run. False when closing."""
        while True:
            with self._changed:
                idle = not (self._runner.running or self._runner.waiting)
                while idle and not self._commands and not self._closing:
                    self._changed.wait()
                commands, self._commands = self._commands, deque()
                if self._closing:
                    return False
            while commands:  # none is kept while waiting: it may hold an adapter that is gone
                commands.popleft()()
            if self._runner.running or self._runner.waiting:
                return True

    def _add(self, row: Request) -> None:
        if row.cancelled:
            return
        if (ended := row.ended) is None:
            self._runner.add(row)
        else:  # continued from a worker that died between its last token and saying so
            self._deliver([(row, ended)])

    def _step(self) -> None:
        outputs = self._runner.step()
        self._progress_at = time.monotonic()
        self._deliver(outputs)

    def _deliver(self, outputs: Sequence[tuple[Request, StepOutput]]) -> None:
        """Emit one step's outputs, without those cancelled meanwhile.

        Under the lock, so that nothing of a job is emitted once `cancel` has returned.
        """
        with self._changed:
            live = [output for row, output in outputs if not row.cancelled]
            for output in live:
                if output.finish is not None or output.error is not None:
                    self._end(self._rows.pop(output.id))
            heard = [output for output in live if output.id >= 0]
            if heard:
                self._emit(heard)

    def _end(self, row: Request) -> None:
        if isinstance(row, Row) and row.private is not None:
            row.private.set()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.fatal = error
            lost, self._rows = [key for key in self._rows if key >= 0], {}
            self._commands.clear()
        message = f"The engine failed: {type(error).__name__}: {error}"
        if lost:
            self._emit([StepOutput(job_id, [], error=message) for job_id in lost])


def _throw(error: Exception) -> None:
    raise error
