"""The vLLM engine: jobs to the core, and what each step brings as one list.

The worker's I/O thread submits and cancels; a thread here takes the core's outputs and emits them.
Should the core die, every request under way gets an error, `fatal` is set, and the worker is
expected to exit and be started again, the core's other processes with it.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from servekit.engines import pooling, weights
from servekit.engines.base import EmbedJob, Emit, Engine, Job, Load, Report, StepOutput
from servekit.engines.choosing import resolve
from servekit.engines.codec import TokenizerCodec
from servekit.engines.dialect import find_dialect, takes_tools
from servekit.engines.grammar import Constraint
from servekit.engines.guard import Limits, check, check_inputs
from servekit.engines.pieces import Pieces
from servekit.engines.source import resolve as resolve_source
from servekit.engines.vllm import activity, arguments, requests, stated
from servekit.engines.vllm.adapters import Adapters
from servekit.engines.vllm.core import Core, first_line, version
from servekit.engines.vllm.probing import Probes
from servekit.engines.vllm.requests import Embedding, Held
from servekit.errors import EngineFailed, LoadError, RequestError, Unsupported
from servekit.wire.adapters import AdapterInfo, AdapterSpec
from servekit.wire.dialects import markers
from servekit.wire.messages import Capability, Dialect, Grammar, ModelInfo, WorkerSpec

log = logging.getLogger(__name__)

SERVES: tuple[Capability, ...] = (
    *("generate", "tokenize", "detokenize", "logprobs", "logit_bias", "penalties", "min_p"),
)
#: How often it is looked whether the core is alive, while it brings nothing.
_LOOK_EVERY_S = 0.2
CLOSE_TIMEOUT_S = 5.0
_GONE = "The engine has stopped; the worker is being restarted."


class VllmEngine(Engine):
    """See the module's docstring; options are `config.engines.VllmOptions`."""

    _core: Core
    _probes: Probes
    _stated: stated.Stated

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.fatal: Exception | None = None
        self._held = Held()
        self._changing = threading.Lock()  # what is held
        self._emit: Emit = lambda outputs: None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._serial = itertools.count()
        self._progress_at = time.monotonic()
        self._running, self._kv_used = 0, 0.0  # as the core has told last
        self._adapters: Adapters | None = None

    # ---------------------------------------------------------------- loading

    def load(self, report: Report) -> ModelInfo:
        folder = Path(resolve_source(self.spec.path, self.spec.revision, report))
        tokenizer = weights.load_tokenizer(folder, self.spec)
        self.codec: TokenizerCodec = TokenizerCodec(tokenizer)
        self._pieces = Pieces(tokenizer)
        self._parameters = stated.parameters(folder)
        self._embeds = pooling.is_embedder(folder)
        memory = arguments.memory_of(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        asked = arguments.arguments(self.spec, folder, memory, embeds=self._embeds)
        with activity.reported(report):
            self._core = Core(asked, self.spec.model)
        self._probes = Probes(self._core)
        model = self._core.config.model_config
        self.vocab_size = int(model.get_vocab_size())
        self._limits = Limits(self.vocab_size, int(model.max_model_len))
        self._stated = stated.read(folder, tokenizer, self.vocab_size)
        self._defaults = self._stated.sampling | {
            name: value for name, value in self.spec.sampling.items() if value is not None
        }
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()  # its own questions are answered there
        return self._embedding() if self._embeds else self._generating(folder, tokenizer)

    def _embedding(self) -> ModelInfo:
        size = self._probes.width()
        info = self._info(("embed", "tokenize", "detokenize"))
        return structs.replace(info, embedding_size=size, chat=False)

    def _generating(self, folder: Path, tokenizer: Any) -> ModelInfo:
        self._grammars = stated.grammars(tokenizer, self.vocab_size, self._stated.eos)
        dialect = self._dialect()
        serves = list(SERVES)
        if self._grammars is not None:
            serves.append("grammar")
        read = dialect.tools or self.spec.tool_parser == "none"  # calls in the text, as wished
        if read and takes_tools(self.codec.template):
            serves.append("tools")
        info = structs.replace(self._info(tuple(serves)), dialect=dialect)
        return info if self._core.config.lora_config is None else self._with_adapters(info, folder)

    def _with_adapters(self, info: ModelInfo, folder: Path) -> ModelInfo:
        rank = int(self._core.config.lora_config.max_lora_rank)
        names = {self.spec.path, self.spec.model, str(folder)}
        self._adapters = Adapters(self.spec, names, rank, self._core, self._probes.scores)
        loaded, refused = self._adapters.load_all(self.spec.adapters)
        serves: tuple[Capability, ...] = (*info.serves, "adapters")
        return structs.replace(info, serves=serves, adapters=loaded, refused_adapters=refused)

    def _info(self, serves: tuple[Capability, ...]) -> ModelInfo:
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
            device="cuda" if self.spec.gpus == 1 else f"cuda × {self.spec.gpus}",
            detail=f"vLLM {version()}, KV cache of {tokens} tokens",
            serves=serves,
            sleeps=bool(model.enable_sleep_mode),
            prefix_block=block if caches else 0,
            prefix_tokens=tokens if caches else 0,
        )

    def _dialect(self) -> Dialect:
        found = find_dialect(self.codec.template, self.spec.tool_parser, self.spec.reasoning_parser)
        known = self.codec.tokens_of(markers(found))
        tokens = [(text, token) for text, token in known.items() if token not in self._stated.eos]
        return structs.replace(found, tokens=tuple(tokens))

    # ---------------------------------------------------------------- the caller's side

    def start(self, emit: Emit) -> None:
        self._emit = emit

    def submit(self, job: Job) -> None:
        if self._embeds:
            raise Unsupported("This model makes embeddings only.", param="model")
        check(job, self._limits)
        lora = self._adapting().request(job.adapter) if job.adapter else None
        name = self._name(job.id)
        ids = [*job.prompt_ids, *job.emitted] if job.emitted else job.prompt_ids
        made = requests.request(name, ids, lora, sampling_params=self._params(job))
        self._send(job.id, [name], [made])

    def _params(self, job: Job) -> Any:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        sampling = resolve(job.params, self._defaults, self.vocab_size)
        asked = requests.sampling_arguments(job, sampling, self._stated.eos, self._stated.primary)
        try:
            params = SamplingParams(**asked)
        except ValueError as error:
            raise RequestError(f"vLLM refuses this: {first_line(error)}") from error
        params.update_from_generation_config({}, self._stated.primary)
        if job.constraint is not None:  # which `scheduler` takes from `extra_args`
            params.structured_outputs = StructuredOutputsParams(regex=".*")
            params.structured_outputs._backend = "guidance"
        return params

    def embed(self, job: EmbedJob) -> None:
        from vllm.pooling_params import PoolingParams

        if not self._embeds:
            raise Unsupported("This model has no pooling to make embeddings with.", param="model")
        check_inputs(job, self._limits)
        names = [self._name(job.id) for _ in job.inputs]
        made = [
            requests.request(name, ids, None, pooling_params=PoolingParams(task="embed"))
            for name, ids in zip(names, job.inputs, strict=True)
        ]
        self._send(job.id, names, made, Embedding(names, [b""] * len(names), len(names)))

    def _name(self, job_id: int) -> str:
        return f"{job_id}#{next(self._serial)}"

    def _send(
        self, job_id: int, names: list[str], made: Sequence[Any], texts: Embedding | None = None
    ) -> None:
        with self._changing:
            if self.fatal is not None or self._closing:
                raise EngineFailed(_GONE)
            if job_id in self._held.names:
                raise RequestError(f"Request id {job_id} is already in flight.")
            if not self._held.names:
                self._progress_at = time.monotonic()  # what was idle until now is not late
            self._held.names[job_id] = names
            if texts is not None:
                self._held.embeddings[job_id] = texts
            self._held.jobs |= dict.fromkeys(names, job_id)
        try:
            self._core.add(made)
        except Exception as error:  # the core has died; the loop will say so
            self._forget(job_id)
            raise EngineFailed(_GONE) from error

    def cancel(self, job_id: int) -> None:
        names = self._forget(job_id)
        if names and self.fatal is None and not self._closing:
            try:
                self._core.abort(names)
            except Exception as error:  # as above
                log.warning("cannot cancel: %s", error)

    def _forget(self, job_id: int) -> list[str]:
        with self._changing:
            names = self._held.names.pop(job_id, [])
            self._held.embeddings.pop(job_id, None)
            for name in names:
                self._held.jobs.pop(name, None)
        return names

    def constrain(self, grammar: Grammar, emitted: Sequence[int]) -> Constraint:
        if self._embeds or self._grammars is None:
            reason = "This model's tokenizer is of a kind that llguidance cannot read."
            raise Unsupported(reason, param=grammar.param)
        return self._grammars.constraint(grammar, emitted)

    def load_adapter(self, adapter: AdapterSpec) -> AdapterInfo:
        return self._adapting().load(adapter)

    def unload_adapter(self, name: str) -> None:
        self._adapting().unload(name)

    def _adapting(self) -> Adapters:
        if self._adapters is None:
            raise Unsupported(
                "This model takes no adapters: its vLLM was started without. Set its option "
                "max_loras, or name adapters in the file.",
                param="lora_name",
            )
        return self._adapters

    def load_now(self) -> Load:
        total = len(self._held.names)
        running = min(self._running, total)
        age_s = time.monotonic() - self._progress_at if total else 0.0
        return Load(running, total - running, self._kv_used if total else 0.0, age_s)

    def close(self) -> None:
        with self._changing:
            self._closing = True
        if (core := getattr(self, "_core", None)) is not None:
            core.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- asleep

    def sleep(self) -> None:
        self._order("sleep", self._level)

    def wake(self) -> None:
        if self._level == 1:
            self._order("wake_up", None)
        else:
            self._order("wake_up", ["weights"])
            self._order("collective_rpc", "reload_weights", None, (), None)
            self._order("wake_up", ["kv_cache"])
            if self._adapters is not None:
                self._adapters.restore()
        self._progress_at = time.monotonic()

    @property
    def _level(self) -> int:
        return int(self.spec.options.get("sleep_level", 1))

    def _order(self, method: str, *args: Any) -> None:
        try:
            self._core.call(method, *args)
        except Exception as error:  # whatever the core has raised comes as this
            raise LoadError(f"vLLM: {first_line(error)}", permanent=False) from error

    # ---------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            while not self._closing:
                if (found := self._core.next(_LOOK_EVERY_S)) is not None:
                    self._take_step(found)
        except Exception as error:
            if not self._closing:
                self._die(error)

    def _take_step(self, found: Any) -> None:
        self._progress_at = time.monotonic()
        if (told := found.scheduler_stats) is not None:
            self._running, self._kv_used = told.num_running_reqs, told.kv_cache_usage
        if made := [one for output in found.outputs if (one := self._take(output)) is not None]:
            self._emit(made)

    def _take(self, output: Any) -> StepOutput | None:
        job_id = self._held.jobs.get(output.request_id)
        if job_id is None:  # cancelled, or a question of our own
            self._probes.take(output)
            return None
        if (embedding := self._held.embeddings.get(job_id)) is not None:
            return self._take_vector(job_id, embedding, output)
        made = requests.output_of(job_id, output, self._stated.eos, self._pieces.of)
        if made.finish or made.error:
            self._forget(job_id)
        return made

    def _take_vector(self, job_id: int, embedding: Embedding, output: Any) -> StepOutput | None:
        if output.pooling_output is None:
            self._forget(job_id)
            return StepOutput(job_id, [], error="vLLM made no embedding; its log says why.")
        vector = output.pooling_output.float().cpu().numpy()
        embedding.vectors[embedding.names.index(output.request_id)] = vector.astype("<f4").tobytes()
        embedding.left -= 1
        if embedding.left:
            return None
        self._forget(job_id)
        return StepOutput(job_id, [], "stop", vectors=embedding.vectors)

    def _die(self, error: Exception) -> None:
        log.exception("the engine died")
        with self._changing:
            self.fatal = error
            ids = list(self._held.names)
            self._held.names.clear()
            self._held.jobs.clear()
            self._held.embeddings.clear()
        self._probes.fail(error)
        if ids:
            self._emit([StepOutput(job_id, [], error=_GONE) for job_id in ids])
