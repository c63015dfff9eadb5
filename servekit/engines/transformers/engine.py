"""The transformers engine: any causal language model that the library can load, and embeddings.

Requests share batches in `batching.continuous.ContinuousRunner` if the model allows it; otherwise
they run one at a time in `sequential.StaticRunner`. A folder with a pooling configuration is an
embedding model, which `embedding.EmbeddingRunner` runs. The loop is always that of
`engines.api.threaded_engine.LoopedEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from msgspec import structs
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.base import EmbedJob, Job, Report
from servekit.engines.api.job_state import ends_of
from servekit.engines.api.job_validation import Limits, check, check_inputs
from servekit.engines.api.load_phases import phase
from servekit.engines.api.threaded_engine import LoopedEngine, Request
from servekit.engines.text.sampling_params import resolve
from servekit.engines.text.structured_output import Constraint
from servekit.engines.text.token_bytes import Pieces
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.engines.text.tool_format_detection import find_dialect, tool_capabilities
from servekit.engines.transformers import embedding, loading, preload, prompt_scores
from servekit.engines.transformers.engine_commands import EngineCommands
from servekit.engines.transformers.lora.manager import AdapterManager
from servekit.engines.transformers.lora.module_clone import BaseChanged
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner_factory import (
    CausalRunner,
    Runner,
    eos_ids,
    sampling_defaults,
)
from servekit.engines.transformers.sleep.sleep_state import SleepState
from servekit.engines.transformers.tensor_parallel import plan
from servekit.engines.transformers.tensor_parallel.controller import Ranks
from servekit.errors import EngineFailed, LoadError, RequestError, Unsupported
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import Capability, Dialect, Grammar, ModelInfo, WorkerSpec
from servekit.protocol.tool_formats import markers

#: Capabilities of every causal model.
SERVES: tuple[Capability, ...] = (
    *("generate", "tokenize", "detokenize", "logprobs", "logit_bias", "penalties", "min_p"),
    *("stop_token_ids", "bad_words"),
)
EMBEDS_ONLY = "This model makes embeddings only."
NO_GRAMMAR = "This model's tokenizer is of a kind that llguidance cannot read."


class TransformersEngine(LoopedEngine):
    """The transformers engine; its options are `config.engines.options.TransformersOptions`."""

    fills_context = True

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._runner: Runner[Any]
        self._shelf: AdapterManager | None = None
        self._ranks: Ranks | None = None
        self._between: EngineCommands
        self._rest: SleepState

    # ---------------------------------------------------------------- loading

    @classmethod
    def prepare(cls, spec: WorkerSpec) -> None:
        preload.prepare(spec)

    def load(self, report: Report) -> ModelInfo:
        loaded = loading.load(self.spec, report)
        self._runner, self._ranks = loaded.runner, loaded.ranks
        if self._ranks is not None:
            self._ranks.report_death(self._lose_rank)
        self.codec: TokenizerCodec = loaded.codec
        self.vocab_size = loaded.vocab_size
        self._head_size = loaded.head_size
        context, fills = loaded.info.max_context, self.fills_context
        self._limits = Limits(self.vocab_size, context, self._head_size, fills)
        self._between = EngineCommands(self, cast(CausalRunner, loaded.runner))
        bed = loading.bed(loaded, self.spec, self._tensors)
        self._rest = SleepState(loaded.runner, bed, loaded.ranks)
        if isinstance(loaded.runner, embedding.EmbeddingRunner):
            return loaded.info
        return self._speaking(loaded)

    def _speaking(self, loaded: loading.Loaded) -> ModelInfo:
        """Prepare grammars, dialect and adapters for a generative model; return its properties."""
        model, tokenizer = loaded.model, loaded.tokenizer
        self._eos = eos_ids(model, tokenizer)
        stated = {name: value for name, value in self.spec.sampling.items() if value is not None}
        self._defaults = sampling_defaults(model) | stated
        self._pieces = Pieces(tokenizer)
        with phase("grammars"):
            self._grammars = preload.grammars(tokenizer, self.vocab_size, self._eos)
        dialect = self._dialect()
        info = structs.replace(loaded.info, serves=self._served(model, dialect), dialect=dialect)
        if plan.is_spread(self.spec):
            return info
        runner = cast(CausalRunner, loaded.runner)
        self._shelf = AdapterManager(model, loaded.attention, runner, self.spec, self._between)
        with phase("adapters"):
            adapters, refused = self._shelf.load_all(self.spec.adapters)
        return structs.replace(info, adapters=adapters, refused_adapters=refused)

    def _dialect(self) -> Dialect:
        found = find_dialect(self.codec.template, self.spec.tool_parser, self.spec.reasoning_parser)
        known = self.codec.tokens_of(markers(found))
        tokens = [(text, token) for text, token in known.items() if token not in self._eos]
        return structs.replace(found, tokens=tuple(tokens))

    def _served(self, model: PreTrainedModel, dialect: Dialect) -> tuple[Capability, ...]:
        grammar: tuple[Capability, ...] = ("grammar",) if self._grammars else ()
        tools = tool_capabilities(
            self.codec.template, dialect, self.spec.tool_parser, grammars=bool(grammar)
        )
        adapters: tuple[Capability, ...] = () if plan.is_spread(self.spec) else ("adapters",)
        # A tensor-parallel rank has only a part of the head, which all ranks must run together.
        scored = prompt_scores.base_of(model) is not None and not plan.over_ranks(self.spec)
        scores: tuple[Capability, ...] = ("prompt_logprobs",) if scored else ()
        return (*SERVES, *adapters, *grammar, *tools, *scores)

    # ---------------------------------------------------------------- called by the worker

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
        sampling = resolve(job.params, self._defaults, self._head_size)
        bound = job.constraint is not None
        if bound != (job.params.grammar is not None):
            raise ValueError("a job with a grammar comes with what `constrain` made of it")
        limit = job.params.max_tokens or 1
        ends = ends_of(job, self._eos)
        row = Row(self._key(job.id), job, sampling, ends, limit, self._pieces.of)
        row.constraint = cast(Constraint | None, job.constraint)
        row.adapter = adapter
        self._take(row)

    def _take(self, row: Request) -> None:
        with self._changed:
            if self._rest.asleep and not self.ended:
                raise EngineFailed("The model is asleep.")
            super()._take(row)

    def load_adapter(self, adapter: AdapterSpec) -> AdapterInfo:
        try:
            return self._adapting().load(adapter)
        except BaseChanged as error:  # the worker must be replaced
            self.post(partial(_throw, error))
            raise EngineFailed(str(error)) from error

    def unload_adapter(self, name: str) -> None:
        shelf = self._adapting()
        with self._changed:
            rows = [row for row in self._rows.values() if isinstance(row, Row)]
        if any(row.job.adapter == name for row in rows):
            raise RequestError(f"Requests with adapter {name!r} are under way.", param="lora_name")
        shelf.unload(name)

    def _adapting(self) -> AdapterManager:
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

    def sleep(self) -> None:
        self._between.between_steps(self._rest.sleep)

    def wake(self) -> None:
        self._between.between_steps(self._rest.wake)

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the device that are not the model's own."""
        yield from self._runner.tensors()
        if self._shelf is not None:
            yield from self._shelf.tensors()

    def close(self) -> None:
        super().close()
        if self._ranks is not None:
            self._ranks.close()

    def _die(self, error: BaseException) -> None:
        if self._ranks is None or not self._ranks.dying:  # otherwise `_lose_rank` has the cause
            super()._die(error)

    def _lose_rank(self, reason: str) -> None:
        self.fatal = EngineFailed(reason)

    # ---------------------------------------------------------------- for `EngineCommands`

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def ended(self) -> bool:
        return self.fatal is not None or self._closing

    def post(self, command: Callable[[], None]) -> None:
        """Run a command in the engine's thread before its next step."""
        with self._changed:
            self._post(command)

    def take_first(self, row: Row) -> None:
        """Run a private row before all waiting rows."""
        with self._changed:
            self._rows[row.job.id] = row
            self._post(lambda: cast(CausalRunner, self._runner).add_first(row))

    def _end(self, row: Request) -> None:
        if isinstance(row, Row) and row.private is not None:
            row.private.set()


def _throw(error: Exception) -> None:
    raise error
