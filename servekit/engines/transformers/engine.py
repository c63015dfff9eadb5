"""The transformers engine: language models, embedding models, classifiers, and Whisper models.

Requests share batches in `batching.continuous.ContinuousRunner` if the model allows it; otherwise
they run one at a time in `sequential.StaticRunner`. `vision.image_runner` has those with images. A
folder with a pooling configuration is an embedding model, which `embedding.EmbeddingRunner` runs; a
sequence classifier is run by `classification.ClassificationRunner`, a Whisper model by
`speech.transcription`. The loop is always that of `engines.api.threaded_engine.LoopedEngine`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import structlog
from msgspec import structs
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.base import EmbedJob, Job, Load, MediaPrompt, Report, SpeechJob
from servekit.engines.api.job_state import EmbedRow, ends_of
from servekit.engines.api.job_validation import (
    Limits,
    check_inputs,
    check_job,
    usable_defaults,
)
from servekit.engines.api.load_phases import phase
from servekit.engines.api.threaded_engine import LoopedEngine, Request
from servekit.engines.media.media_warnings import warn_unavailable
from servekit.engines.media.recording import MAX_AUDIO_S
from servekit.engines.text.sampling_params import resolve_sampling
from servekit.engines.text.structured_output import Constraint
from servekit.engines.text.token_bytes import Pieces
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.engines.text.tool_format_detection import tool_capabilities
from servekit.engines.transformers import loading, preload, prompt_scores
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.lora.manager import AdapterManager
from servekit.engines.transformers.lora.module_clone import BaseChanged
from servekit.engines.transformers.pooling_models import classification, embedding
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner import CausalRunner, Runner
from servekit.engines.transformers.runner_factory import eos_ids, sampling_defaults
from servekit.engines.transformers.sleep.sleep_state import SleepState
from servekit.engines.transformers.speech.transcription import SpeechRow, TranscriptionRunner
from servekit.engines.transformers.tensor_parallel import plan
from servekit.engines.transformers.tensor_parallel.controller import Ranks
from servekit.errors import (
    EngineFailed,
    LoadError,
    RequestError,
    Unsupported,
    describe_error,
)
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import (
    Capability,
    ChatMessage,
    Dialect,
    Grammar,
    ModelInfo,
    SamplingParams,
    SpeechParams,
    WorkerSpec,
)
from servekit.protocol.tasks import NOUNS
from servekit.protocol.types import MODALITIES, Modality

if TYPE_CHECKING:  # they need Pillow, which texts do not
    from servekit.engines.media.media_prompts import MediaEncoder
    from servekit.engines.transformers.vision.image_runner import ImageRunner, ImagesBeside

log: Any = structlog.get_logger(__name__)

#: Capabilities of every causal model.
SERVES: tuple[Capability, ...] = (
    *("generate", "tokenize", "detokenize", "logprobs", "logit_bias", "penalties", "min_p"),
    *("stop_token_ids", "bad_words"),
)
#: Runners of models that answer no text with text.
_OTHERS = (embedding.PoolingRunner, TranscriptionRunner)
#: Tokens of each conversation with media that proves a model: later tokens have other positions.
_PROBE_TOKENS = 3
#: How often a thread that waits for the engine's thread checks that the engine is still running.
_LOOK_S = 0.2
NO_TEXT = "This model does not generate text."
MEDIA_AND_VIRTUAL_TOKENS = (
    "messages: the adapter '{}' puts virtual tokens before the prompt, and such a request has no"
    " images and no recordings"
)
NO_GRAMMAR = "This model's tokenizer is of a kind that llguidance cannot read."


class TransformersEngine(LoopedEngine):
    """The transformers engine; its options are `config.engines.options.TransformersOptions`."""

    fills_context = True

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._runner: Runner
        self._adapters: AdapterManager | None = None
        self._no_adapters = plan.NO_ADAPTERS if plan.is_spread(spec) else ""  # why there are none
        self._media: MediaEncoder | None = None
        self._modalities: tuple[Modality, ...] = ()
        self._media_probes: list[Job] = []  # by which the model has shown that it reads media
        self._ranks: Ranks | None = None
        self._sleep_state: SleepState

    # ---------------------------------------------------------------- loading

    @classmethod
    def prepare(cls, spec: WorkerSpec) -> None:
        preload.prepare_model(spec)

    def load(self, report: Report) -> ModelInfo:
        loaded = loading.load_from_spec(self.spec, report)
        self._runner, self._ranks = loaded.runner, loaded.ranks
        if self._ranks is not None:
            self._ranks.report_death(self._lose_rank)
        self.codec: TokenizerCodec = loaded.codec
        self.vocab_size = loaded.vocab_size
        self._head_size = loaded.head_size
        context, fills = loaded.info.max_context, self.fills_context
        self._limits = Limits(self.vocab_size, context, self._head_size, fills)
        store = loading.make_weight_store(loaded, self.spec, self._other_tensors)
        self._sleep_state = SleepState(loaded.runner, store, loaded.ranks)
        if isinstance(loaded.runner, _OTHERS):
            return loaded.info
        return self._prepare_generation(loaded)

    def _prepare_generation(self, loaded: loading.Loaded) -> ModelInfo:
        """Prepare grammars, dialect and adapters for a generative model; return its properties."""
        model, tokenizer = loaded.model, loaded.tokenizer
        self._eos = eos_ids(model, tokenizer)
        self._no_adapters = loading.explain_no_adapters(model, self.spec)
        stated = {name: value for name, value in self.spec.sampling.items() if value is not None}
        self._defaults = usable_defaults(sampling_defaults(model)) | stated
        self._pieces = Pieces(tokenizer)
        with phase("grammars"):
            self._grammars = preload.get_grammars(tokenizer, self.vocab_size, self._eos)
        dialect = self.codec.find_dialect(self.spec, self._eos)
        detail = loaded.info.detail
        if loaded.processor is not None:
            with phase("images"):
                detail += self._prepare_media(loaded.processor)
        serves = self._list_capabilities(model, dialect)
        info = structs.replace(loaded.info, serves=serves, dialect=dialect, detail=detail)
        if self._no_adapters:
            return info
        runner = loaded.runner
        unbatched: Any = getattr(runner, "unbatched", model)  # without hooks of the batches
        self._adapters = AdapterManager(
            unbatched, loaded.attention, runner, self.spec, self, self._media_probes
        )
        with phase("adapters"):
            adapters, refused = self._adapters.load_all(self.spec.adapters)
        return structs.replace(info, adapters=adapters, refused_adapters=refused)

    def _list_capabilities(
        self, model: PreTrainedModel, dialect: Dialect
    ) -> tuple[Capability, ...]:
        grammar: tuple[Capability, ...] = ("grammar",) if self._grammars else ()
        tools = tool_capabilities(
            self.codec.template, dialect, self.spec.tool_parser, grammars=bool(grammar)
        )
        adapters: tuple[Capability, ...] = () if self._no_adapters else ("adapters",)
        # A tensor-parallel rank has only a part of the head, which all ranks must run together.
        scored = prompt_scores.base_of(model) is not None and not plan.over_ranks(self.spec)
        scores: tuple[Capability, ...] = ("prompt_logprobs",) if scored else ()
        return (*SERVES, *adapters, *grammar, *tools, *scores, *self._modalities)

    def _prepare_media(self, processor: Any) -> str:
        """Prepare for the images and recordings that the model reads, and say how; else warn."""
        try:
            from servekit.engines.media import media_prompts
        except ImportError as error:  # Pillow is not installed: texts are served anyway
            warn_unavailable(self.spec.model, describe_error(error))
            return ""
        max_audio_s = self.spec.options.get("max_audio_s") or MAX_AUDIO_S
        tried: Sequence[Modality] = media_prompts.list_modalities(processor)
        try:
            encoder = media_prompts.MediaEncoder(processor, self.codec.template, max_audio_s)
            proofs = {one: jobs for one in tried if (jobs := self._prove(encoder, one))}
            if not proofs:
                return ""
            runner = cast("ImageRunner | ImagesBeside", self._runner)
            probes = [job for jobs in proofs.values() for job in jobs]
            how = runner.place_media(probes)
        except Exception as error:  # of the library's processor or model: texts are served anyway
            if self._ranks_left_behind:
                raise
            for modality in tried:
                warn_unavailable(self.spec.model, describe_error(error), modality)
            return ""
        self._media, self._modalities, self._media_probes = encoder, tuple(proofs), probes
        detail = f"{' and '.join(NOUNS[one] for one in proofs)} {how}"
        log.info("images_prepared", model=self.spec.model, detail=detail)
        return f"; {detail}"

    @property
    def _ranks_left_behind(self) -> bool:
        return self._ranks is not None and self._ranks.left_behind

    def _prove(self, encoder: MediaEncoder, modality: Modality) -> list[Job]:
        """Return the jobs by which the model has shown that it reads a modality; else warn."""
        from servekit.engines.media.media_prompts import make_probes

        jobs = []
        try:
            for number, message in enumerate(make_probes(modality)):
                prompt, params = (
                    encoder.encode_chat([message]),
                    SamplingParams(max_tokens=_PROBE_TOKENS),
                )
                id = -1 - number - 2 * MODALITIES.index(modality)
                jobs.append(Job(id, prompt.ids, params, media=prompt.inputs))
                check_job(jobs[-1], self._limits)
            cast("ImageRunner | ImagesBeside", self._runner).read_media(jobs)
        except Exception as error:  # of the library's processor or model
            if self._ranks_left_behind:
                raise
            warn_unavailable(self.spec.model, describe_error(error), modality)
            return []
        return jobs

    # ---------------------------------------------------------------- called by the worker

    def embed(self, job: EmbedJob) -> None:
        if not isinstance(self._runner, embedding.EmbeddingRunner):
            raise Unsupported("This model has no pooling to make embeddings with.", param="model")
        check_inputs(job, self._limits)
        self._take(EmbedRow(self._key(job.id), job))

    def classify(self, job: EmbedJob) -> None:
        if not isinstance(self._runner, classification.ClassificationRunner):
            raise Unsupported("This model has no head to classify texts with.", param="model")
        check_inputs(job, self._limits)
        self._take(EmbedRow(self._key(job.id), job))

    def read_recording(self, file: bytes, speech: SpeechParams) -> object:
        return self._transcription_runner().reader.read_speech(file, speech)

    def transcribe(self, job: SpeechJob) -> None:
        self._transcription_runner()
        self._take(SpeechRow(job, self._note_progress))

    def _transcription_runner(self) -> TranscriptionRunner:
        if not isinstance(self._runner, TranscriptionRunner):
            raise Unsupported("This model hears no speech.", param="model")
        return self._runner

    def submit(self, job: Job) -> None:
        if isinstance(self._runner, _OTHERS):
            raise Unsupported(NO_TEXT, param="model")
        adapter = self._adapter_manager().get(job.adapter) if job.adapter else None
        virtual_tokens = adapter.virtual_tokens if adapter else 0
        if job.media is not None and virtual_tokens:
            raise Unsupported(MEDIA_AND_VIRTUAL_TOKENS.format(job.adapter), param="messages")
        check_job(job, self._limits, virtual_tokens)
        sampling = resolve_sampling(job.params, self._defaults, self._head_size)
        limit = job.params.max_tokens or 1
        ends = ends_of(job, self._eos)
        row = Row(self._key(job.id), job, sampling, ends, limit, self._pieces.find_bytes)
        row.constraint = cast(Constraint | None, job.constraint)
        row.adapter = adapter
        self._take(row)

    def _take(self, row: Request) -> None:
        with self._changed:
            if self._sleep_state.asleep and not self.ended:
                raise EngineFailed("The model is asleep.")
            super()._take(row)

    def load_adapter(self, adapter: AdapterSpec) -> AdapterInfo:
        try:
            return self._adapter_manager().load(adapter)
        except BaseChanged as error:  # the worker must be replaced
            with self._changed:
                self._post(partial(_raise_error, error))
            raise EngineFailed(str(error)) from error

    def unload_adapter(self, name: str) -> None:
        adapters = self._adapter_manager()
        with self._changed:
            rows = [row for row in self._rows.values() if isinstance(row, Row)]
        if any(row.job.adapter == name for row in rows):
            raise RequestError(f"Requests with adapter {name!r} are under way.", param="lora_name")
        adapters.drop_adapter(name)

    def _adapter_manager(self) -> AdapterManager:
        if self._sleep_state.asleep:
            raise LoadError("The model is asleep; wake it first.", permanent=False)
        if self._adapters is None:
            raise Unsupported(self._no_adapters or NO_TEXT, param="lora_name")
        return self._adapters

    def constrain(self, grammar: Grammar, emitted: Sequence[int]) -> Constraint:
        if self._grammars is None:
            raise Unsupported(NO_GRAMMAR, param=grammar.param)
        return self._grammars.constraint(grammar, emitted)

    def encode_media(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        continues: bool,
    ) -> MediaPrompt:
        if self._media is None:
            return super().encode_media(messages, tools, template, continues)
        return self._media.encode_chat(messages, tools, template, continues)

    def sleep(self) -> None:
        self.between_steps(self._sleep_state.sleep)

    def wake(self) -> None:
        self.between_steps(self._sleep_state.wake)

    def _other_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the device that are not the model's own."""
        yield from self._runner.tensors()
        if self._adapters is not None:
            yield from self._adapters.tensors()

    def close(self) -> None:
        super().close()
        if self._ranks is not None:
            self._ranks.close()

    def _die(self, error: BaseException) -> None:
        if (
            self._ranks is None or not self._ranks.has_dead_rank
        ):  # otherwise `_lose_rank` has the cause
            super()._die(error)

    def _lose_rank(self, reason: str) -> None:
        self.fatal = EngineFailed(reason)

    def load_now(self) -> Load:
        load, runner = super().load_now(), getattr(self._runner, "texts", self._runner)
        return runner.speculated.add_to(load) if isinstance(runner, ContinuousRunner) else load

    # ---------------------------------------------------------------- between steps

    @property
    def ended(self) -> bool:
        return self.fatal is not None or self._closing

    def between_steps(self, work: Callable[[], None]) -> None:
        """Run `work` in the engine's thread between two steps, and return when it is done.

        Before the engine is started, its loading thread takes the role of the engine's thread. The
        exception of `work` is raised here. Raises EngineFailed if the engine ends.
        """
        if self._thread is None:
            work()
            return
        done, failure = threading.Event(), list[BaseException]()

        def run_command() -> None:
            try:
                work()
            except BaseException as error:
                failure.append(error)
            done.set()

        with self._changed:
            self._post(run_command)
        self._await_event(done)
        if failure:
            raise failure[0]

    def run_rows(self, rows: Sequence[Row]) -> None:
        """Run rows to completion in the engine's batches, without emitting their output.

        They go before all waiting rows. Raises EngineFailed if the engine ends.
        """
        runner = cast(CausalRunner, self._runner)
        if self._thread is None:
            for row in rows:
                runner.add(row)
            while runner.running or runner.waiting:
                runner.step()
            return
        ends = []
        for row in rows:
            row.private = threading.Event()
            ends.append(row.private)
            with self._changed:
                self._rows[row.job.id] = row
                self._post(partial(runner.add_first, row))
        for end in ends:
            self._await_event(end)

    def _await_event(self, event: threading.Event) -> None:
        while not event.wait(_LOOK_S):
            if self.ended:
                raise EngineFailed("The engine has stopped; the worker is being restarted.")

    def _end(self, row: Request) -> None:
        if isinstance(row, Row) and row.private is not None:
            row.private.set()


def _raise_error(error: Exception) -> None:
    raise error
