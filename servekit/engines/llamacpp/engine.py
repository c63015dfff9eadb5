"""The llama.cpp engine: batched generation and embeddings from unmodified GGUF files.

It uses llama.cpp's low-level interface in the library that a Python binding brings. llama.cpp's own
server cannot keep what is promised of continuation, grammars and log probabilities; the page
internals/llamacpp of the documentation says where, and `tests.bench.llama_server_ways` shows it.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import structlog
from msgspec import structs

from servekit.engines.api.base import EmbedJob, Job, Load, MediaPrompt, Report
from servekit.engines.api.generation_identity import identify_files
from servekit.engines.api.job_state import EmbedRow, ends_of
from servekit.engines.api.job_validation import (
    Limits,
    check_inputs,
    check_job,
    usable_defaults,
)
from servekit.engines.api.load_phases import phase
from servekit.engines.api.speculation import get_speculation
from servekit.engines.api.threaded_engine import LoopedEngine
from servekit.engines.llamacpp.embedding import LlamaClassifier, LlamaEmbedder
from servekit.engines.llamacpp.generation import GenerationRunner
from servekit.engines.llamacpp.library.bindings import POOLINGS
from servekit.engines.llamacpp.loading import Loaded, load_from_spec
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.llamacpp.speculation_setup import make_speculator
from servekit.engines.llamacpp.tokenizer import LlamaCodec
from servekit.engines.media.media_warnings import warn_unavailable
from servekit.engines.media.recording import MAX_AUDIO_S
from servekit.engines.text.sampling_params import resolve_sampling
from servekit.engines.text.structured_output import Constraint, Grammars, try_grammars
from servekit.engines.text.tool_format_detection import tool_capabilities
from servekit.errors import LoadError, RequestError, Unsupported, describe_error
from servekit.model_metadata.gguf import quantization, read_sampling_defaults
from servekit.protocol.messages import (
    Capability,
    ChatMessage,
    Dialect,
    Grammar,
    ModelInfo,
    SamplingParams,
)
from servekit.protocol.tasks import NOUNS
from servekit.protocol.types import Modality

if TYPE_CHECKING:
    from servekit.engines.llamacpp.media.media_prompts import MediaEncoder

log: Any = structlog.get_logger(__name__)

SERVES: tuple[Capability, ...] = (
    *("generate", "tokenize", "detokenize", "logprobs", "logit_bias", "penalties", "min_p"),
    *("stop_token_ids", "bad_words", "prompt_logprobs"),
)
#: Architectures whose scores are computed in llama.cpp: the probabilities of "yes" and "no".
ACTIVATED = ("qwen3", "qwen3vl")
NO_SCORES = "the llamacpp engine tells none of a prompt with images or recordings"
NO_GRAMMAR = "This model's vocabulary is of a kind that llguidance cannot read."


class LlamaCppEngine(LoopedEngine):
    """The llama.cpp engine; its options are `config.engines.LlamaCppOptions`."""

    fills_context = True
    _loaded: Loaded | None = None
    _grammars: Grammars | None = None
    _media: MediaEncoder | None = None
    _media_detail = ""

    # ---------------------------------------------------------------- loading

    def load(self, report: Report) -> ModelInfo:
        self._loaded = loaded = load_from_spec(self.spec, report)
        vocabulary = loaded.model.vocabulary
        generates = loaded.pooling is None
        template = self.spec.chat_template or loaded.model.chat_template
        ranks = loaded.pooling == POOLINGS["rank"]
        pairs = loaded.model.pair_template if ranks else ""
        self.codec = codec = LlamaCodec(
            vocabulary,
            template if generates else "",
            pairs,
            completes_chats=loaded.projector is not None,
        )
        self.vocab_size = vocabulary.size
        context = loaded.plan.max_context
        self._limits = Limits(vocabulary.size, context, fills=self.fills_context)
        info = self._describe_model(loaded)
        if ranks:
            return self._prepare_ranking(loaded, info)
        if not generates:
            self._runner = LlamaEmbedder(loaded.context, loaded.context.batch_tokens)
            return structs.replace(
                info,
                serves=("embed", "tokenize", "detokenize"),
                embedding_size=loaded.model.embedding_size,
            )
        return self._prepare_generation(loaded, codec, info)

    def _prepare_generation(self, loaded: Loaded, codec: LlamaCodec, info: ModelInfo) -> ModelInfo:
        """Create the runner of a model that writes, and return what it serves."""
        vocabulary, detail, speculator = loaded.model.vocabulary, info.detail, None
        if (speculation := get_speculation(self.spec)) is not None:
            with phase("proposals"):
                speculator, how = make_speculator(speculation, loaded)
            detail += f"; {how}"
        self._runner = GenerationRunner(
            loaded.context,
            loaded.context.batch_tokens,
            rewinds=loaded.model.rewinds,
            projector=loaded.projector,
            speculator=speculator,
        )
        self._eos = vocabulary.eos
        stated = {name: value for name, value in self.spec.sampling.items() if value is not None}
        own = usable_defaults(read_sampling_defaults(vocabulary.read_metadata))
        self._defaults: dict[str, Any] = own | stated
        self._grammars = try_grammars(
            lambda: Grammars.from_vocabulary(
                vocabulary.for_grammars(), vocabulary.size, vocabulary.eos
            )
        )
        dialect = codec.find_dialect(self.spec, self._eos)
        serves = (*self._list_capabilities(dialect), *self._prepare_media(loaded, codec))
        return structs.replace(
            info,
            chat=codec.chat,
            serves=serves,
            dialect=dialect,
            detail=detail + self._media_detail,
        )

    def _prepare_media(self, loaded: Loaded, codec: LlamaCodec) -> tuple[Modality, ...]:
        """Return what the model reads beside text: it has read a sample of each."""
        if loaded.projector is None:
            return ()
        if not codec.chat:
            warn_unavailable(self.spec.model, "the model has no chat template")
            return ()
        try:
            from servekit.engines.llamacpp.media.media_prompts import MediaEncoder
        except ImportError as error:  # Pillow is not installed: texts are served anyway
            warn_unavailable(self.spec.model, describe_error(error))
            return ()
        encoder = MediaEncoder(
            loaded.projector,
            codec,
            float(self.spec.options.get("max_audio_s") or MAX_AUDIO_S),
            loaded.context.batch_tokens,
        )
        read = [one for one in loaded.projector.modalities if self._prove(encoder, one)]
        if not read:
            return ()
        self._media = encoder
        detail = " and ".join(NOUNS[one] for one in read)
        log.info("images_prepared", model=self.spec.model, detail=f"{detail} in the batch")
        self._media_detail = f"; {detail} by {loaded.projector.path.name}"
        return tuple(read)

    def _prove(self, encoder: MediaEncoder, modality: Modality) -> bool:
        """Have the model read a sample, and warn if it cannot."""
        from servekit.engines.media.media_prompts import make_probes

        try:
            with phase("images"):
                prompt = encoder.encode_chat(make_probes(modality)[:1])
                params = SamplingParams(max_tokens=1, temperature=0.0)
                job = Job(-1, prompt.ids, params, media=prompt.inputs)
                check_job(job, self._limits)
                self._read_sample(self._make_row(job))
        except (RequestError, RuntimeError) as error:
            if self.spec.options.get("mmproj") is not None:
                raise LoadError(
                    f"options.mmproj: the model cannot read a sample: {error}"
                ) from error
            warn_unavailable(self.spec.model, describe_error(error), modality)
            return False
        return True

    def _read_sample(self, row: LlamaRow) -> None:
        self._runner.add(row)
        while self._runner.running or self._runner.waiting:
            for _, output in self._runner.step():
                if output.error:
                    raise RequestError(output.error)

    def _prepare_ranking(self, loaded: Loaded, info: ModelInfo) -> ModelInfo:
        labels = loaded.model.labels()
        activated = loaded.header.architecture in ACTIVATED
        self._runner = LlamaClassifier(
            loaded.context, loaded.context.batch_tokens, len(labels), activated=activated
        )
        serves: tuple[Capability, ...] = ("classify", "tokenize", "detokenize")
        if len(labels) == 1 or activated:
            serves = ("score", *serves)
            if not loaded.model.pair_template:
                loaded.model.vocabulary.check_pairs()
        return structs.replace(info, serves=serves, labels=labels)

    def _describe_model(self, loaded: Loaded) -> ModelInfo:
        plan, model = loaded.plan, loaded.model
        where = f", {plan.gpu_layers} layers on the GPU" if plan.gpu_layers else ""
        return ModelInfo(
            max_context=plan.max_context,
            slots=loaded.context.sequences,
            chat=False,
            architecture=loaded.header.architecture,
            dtype=quantization(loaded.header.metadata, model.description),
            device="cuda:0" if self.spec.device == "cuda" else "cpu",
            parameters=model.parameters,
            kv_cache_bytes=plan.cache_bytes,
            weights_bytes=model.size_bytes + (loaded.draft.model.size_bytes if loaded.draft else 0),
            prefix_block=1 if model.rewinds and loaded.pooling is None else 0,
            prefix_tokens=plan.context if model.rewinds and loaded.pooling is None else 0,
            detail=f"{loaded.binding.library.binding}, cache of {plan.context} tokens{where}",
        )

    def _list_capabilities(self, dialect: Dialect) -> tuple[Capability, ...]:
        grammar: tuple[Capability, ...] = ("grammar",) if self._grammars else ()
        template, parser = cast(LlamaCodec, self.codec).template, self.spec.tool_parser
        tools = tool_capabilities(template, dialect, parser, grammars=bool(grammar))
        return (*SERVES, *grammar, *tools)

    def identify(self, *, portable: bool = False) -> str:
        found = super().identify(portable=portable)
        projector = self._loaded and self._loaded.projector
        if not projector:
            return found
        return f"{found}.{identify_files(str(projector.path), None, portable=portable)}"

    # ---------------------------------------------------------------- requests

    def submit(self, job: Job) -> None:
        if isinstance(self._runner, LlamaEmbedder):
            raise Unsupported("This model does not generate text.", param="model")
        check_job(job, self._limits)
        if job.media is not None and job.params.prompt_logprobs is not None:
            param = "echo" if job.params.echo else "prompt_logprobs"
            raise Unsupported(f"{param}: {NO_SCORES}", param=param)
        self._take(self._make_row(job))

    def _make_row(self, job: Job) -> LlamaRow:
        sampling = resolve_sampling(job.params, self._defaults, self.vocab_size)
        ends = ends_of(job, self._eos)
        return LlamaRow(
            *(self._key(job.id), job, sampling, ends, job.params.max_tokens or 1),
            piece=self._loaded_model().vocabulary.piece,
            constraint=cast(Constraint | None, job.constraint),
        )

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

    def load_now(self) -> Load:
        load, runner = super().load_now(), self._runner
        return runner.speculated.add_to(load) if isinstance(runner, GenerationRunner) else load

    def _note_progress(self) -> None:
        runner = self._runner
        if not (isinstance(runner, GenerationRunner) and runner.hangs):
            super()._note_progress()

    def classify(self, job: EmbedJob) -> None:
        if not isinstance(self._runner, LlamaClassifier):
            raise Unsupported("This model has no head to classify texts with.", param="model")
        check_inputs(job, self._limits)
        self._take(EmbedRow(self._key(job.id), job))

    def embed(self, job: EmbedJob) -> None:
        if not isinstance(self._runner, LlamaEmbedder):
            raise Unsupported(
                "This model has no pooling to make embeddings with; options.pooling gives it one.",
                param="model",
            )
        check_inputs(job, self._limits)
        self._take(EmbedRow(self._key(job.id), job))

    def constrain(self, grammar: Grammar, emitted: Sequence[int]) -> Constraint:
        if self._grammars is None:
            raise Unsupported(NO_GRAMMAR, param=grammar.param)
        return self._grammars.constraint(grammar, emitted)

    def close(self) -> None:
        super().close()
        ended = self._thread is None or not self._thread.is_alive()
        if self._loaded is not None and ended:
            self._loaded.close()

    def _loaded_model(self) -> Any:
        if self._loaded is None:
            raise RuntimeError("the engine is not loaded")
        return self._loaded.model
