"""The parts of vLLM that servekit uses, the tested releases, and the interface for a release.

A release that has all of `REQUIRED` is used by its engine core: servekit tokenizes, and the worker
is a client of the core. A release that lacks something is used by its own server, `vllm serve`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from servekit.vllm_source.reader import SourceTree

Api = Literal["core", "server"]

#: The first tested release, and the first untested one; pyproject.toml says the same.
TRIED = ((0, 20), (0, 34))


@dataclass(frozen=True, slots=True)
class Required:
    """A class or function of vLLM, and the parts of it that servekit uses."""

    at: str  # module:name
    #: Fields, methods and attributes of a class; parameters of a function.
    has: tuple[str, ...] = ()
    #: servekit creates it, with nothing but parts that it `has`.
    made: bool = False


REQUIRED = (
    Required(
        "vllm.engine.arg_utils:EngineArgs",
        (
            *("model", "runner", "dtype", "max_model_len", "trust_remote_code", "load_format"),
            *("tensor_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes"),
            *("enable_prefix_caching", "enforce_eager", "enable_sleep_mode", "quantization"),
            *("structured_outputs_config", "distributed_executor_backend", "disable_log_stats"),
            "mm_processor_cache_gb",
            *("max_num_seqs", "max_num_batched_tokens", "enable_lora", "max_loras"),
            *("max_cpu_loras", "max_lora_rank", "create_engine_config", "add_cli_args"),
            "hf_overrides",
        ),
        made=True,
    ),
    Required("vllm.utils.argparse_utils:FlexibleArgumentParser"),
    Required(
        "vllm.config:VllmConfig",
        (
            *("scheduler_config", "parallel_config", "cache_config", "model_config"),
            *("lora_config", "instance_id"),
        ),
    ),
    Required("vllm.config:SchedulerConfig", ("async_scheduling", "scheduler_cls", "max_num_seqs")),
    Required("vllm.config:ParallelConfig", ("worker_cls",)),
    Required("vllm.config:ModelConfig", ("runner", "is_multimodal_model")),
    Required("vllm.usage.usage_lib:UsageContext", ("OPENAI_API_SERVER",)),
    Required("vllm.v1.executor:Executor", ("get_class",)),
    Required(
        "vllm.v1.engine.core_client:SyncMPClient",
        (
            *("vllm_config", "executor_class", "log_stats"),
            *("add_request", "abort_requests", "shutdown", "_send_input"),
            *("outputs_queue", "utility_results", "resources"),
        ),
        made=True,
    ),
    Required("vllm.v1.engine.core_client:BackgroundResources", ("engine_manager", "engine_dead")),
    Required("vllm.v1.engine:EngineCoreRequestType", ("UTILITY",)),
    Required(
        "vllm.v1.engine.core:EngineCore",
        ("add_lora", "remove_lora", "sleep", "wake_up", "collective_rpc"),
    ),
    Required(
        "vllm.v1.engine:EngineCoreRequest",
        (
            *("request_id", "prompt_token_ids", "mm_features", "sampling_params"),
            *("pooling_params", "arrival_time", "lora_request", "cache_salt"),
            "data_parallel_rank",
        ),
        made=True,
    ),
    # images
    Required(
        "vllm.v1.engine.input_processor:InputProcessor",
        ("vllm_config", "renderer", "model_config", "supports_mm_inputs", "process_inputs"),
        made=True,
    ),
    Required("vllm.renderers.base:BaseRenderer", ("mm_processor", "process_for_engine")),
    Required(
        "vllm.multimodal.processing:BaseProcessingInfo",
        ("get_supported_mm_limits", "get_hf_processor"),
    ),
    Required("vllm.multimodal.inputs:MultiModalFeatureSpec", ("identifier",)),
    Required("vllm.v1.engine:EngineCoreOutputs", ("outputs", "scheduler_stats")),
    Required(
        "vllm.v1.engine:EngineCoreOutput",
        (
            *("request_id", "new_token_ids", "finish_reason", "stop_reason", "new_logprobs"),
            *("new_prompt_logprobs_tensors", "pooling_output", "prefill_stats"),
        ),
    ),
    Required("vllm.v1.outputs:LogprobsLists", ("logprob_token_ids", "logprobs")),
    Required(
        "vllm.v1.outputs:LogprobsTensors",
        ("logprob_token_ids", "logprobs", "selected_token_ranks"),
    ),
    Required("vllm.v1.metrics.stats:SchedulerStats", ("num_running_reqs", "kv_cache_usage")),
    Required("vllm.v1.metrics.stats:PrefillStats", ("num_cached_tokens",)),
    Required(
        "vllm.sampling_params:SamplingParams",
        (
            *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "seed"),
            *("detokenize", "skip_clone", "stop_token_ids", "logit_bias", "extra_args"),
            *("structured_outputs", "update_from_generation_config", "prompt_logprobs"),
            *("all_stop_token_ids", "bad_words_token_ids", "_bad_words_token_ids"),
        ),
        made=True,
    ),
    Required("vllm.sampling_params:StructuredOutputsParams", ("regex",), made=True),
    Required(
        "vllm.pooling_params:PoolingParams", ("task", "use_activation", "extra_kwargs"), made=True
    ),
    Required("vllm.lora.request:LoRARequest", ("lora_name", "lora_int_id", "lora_path"), made=True),
    Required("vllm.v1.core.sched.scheduler:Scheduler", ("__init__",)),
    Required("vllm.v1.core.sched.async_scheduler:AsyncScheduler"),
    Required("vllm.v1.structured_output:StructuredOutputManager", ("_create_grammar",)),
    Required("vllm.v1.structured_output.backend_guidance:GuidanceBackend"),
    Required(
        "vllm.v1.structured_output.backend_guidance:GuidanceGrammar",
        ("ll_matcher", "ll_tokenizer", "vocab_size", "accept_tokens"),
        made=True,
    ),
    Required(
        "vllm.v1.worker.gpu_worker:Worker",
        (
            *("init_device", "load_model", "execute_model", "sample_tokens", "use_v2_model_runner"),
            *("model_runner", "model_config", "vllm_config", "device"),
        ),
    ),
    Required("vllm.v1.worker.cpu_worker:CPUWorker"),
    Required(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler", ("forward_native", "forward_cpu")
    ),
    # penalties and bad words that count tokens of another worker, in the first model runner
    Required("vllm.v1.sample.sampler:Sampler", ("apply_logits_processors",)),
    Required("vllm.v1.sample.rejection_sampler:RejectionSampler", ("apply_logits_processors",)),
    Required(
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    ),
    Required(
        "vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
        ("logits", "cu_num_draft_tokens", "sampling_metadata"),
    ),
    Required("vllm.v1.sample.metadata:SamplingMetadata", ("output_token_ids",)),
    Required("vllm.v1.worker.gpu_input_batch:InputBatch", ("req_ids",)),
    # and in the second one
    Required(
        "vllm.v1.worker.gpu.sample.bad_words:BadWordsState",
        ("req_states", "add_request", "apply_staged_writes"),
    ),
    Required(
        "vllm.v1.worker.gpu.sample.penalties:PenaltiesState",
        ("req_states", "add_request", "apply_staged_writes"),
    ),
    Required("vllm.v1.worker.gpu.sample.sampler:BadWordsState"),
    Required("vllm.v1.worker.gpu.sample.sampler:PenaltiesState"),
    Required("vllm.v1.worker.gpu.states:RequestState", ("prompt_len",)),
    # noise by seed and position, with which an answer goes on in another worker
    Required("vllm.v1.worker.gpu.sample.gumbel:gumbel_sample", ("seed", "pos")),
    Required(
        "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor",
        ("size", "dtype", "np", "gpu", "copy_to_uva"),
    ),
    Required(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        (
            *("_get_prompt_logprobs_dict", "num_prompt_logprobs", "requests", "sampler"),
            *("input_batch", "discard_request_mask"),
        ),
    ),
    Required("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin", ("_set_active_loras",)),
    # on a CPU, rows without an adapter
    Required("vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink", ("inputs", "lora_indices_tensor")),
    Required("vllm.lora.punica_wrapper.punica_cpu:bgmv_shrink"),
    Required("vllm.device_allocator.cumem:CuMemAllocator", ("get_instance", "get_current_usage")),
)


@dataclass(frozen=True, slots=True)
class ApiChoice:
    """The interface by which servekit uses a release of vLLM, and sentences about the release."""

    api: Api
    lacking: str = ""  # what the core would need
    untested: str = ""

    @property
    def warning(self) -> str:
        if self.lacking and self.api == "server":
            return f"{self.lacking}; its own server serves instead"
        return self.lacking or self.untested


def choose_api(asked: str, root: Path, version: str) -> ApiChoice:
    """Choose the interface of the vLLM below `root`, a folder of packages.

    `asked` is the option `api` of a model.
    """
    if asked == "server":
        return ApiChoice("server")
    if lacking := find_lacking(root):
        what = f"vLLM {version} lacks what servekit uses of its core: {'; '.join(lacking[:3])}"
        return ApiChoice("core" if asked == "core" else "server", lacking=what)
    if is_tried(version):
        return ApiChoice("core")
    untested = f"vLLM {version} was not tested with servekit, only {tried_releases()}"
    return ApiChoice("core", untested=untested)


def find_lacking(root: Path) -> list[str]:
    """Return sentences about required parts that the packages in `root` do not have."""
    tree = SourceTree(root)
    return [sentence for one in REQUIRED for sentence in find_missing(one, tree)]


def find_missing(one: Required, tree: SourceTree) -> Iterator[str]:
    module, _, name = one.at.partition(":")
    try:
        found = tree.members_of(module, name)
    except LookupError as error:
        yield f"it has no {module}.{name} ({error.args[0]})"
        return
    if lacking := [part for part in one.has if part not in found]:
        yield f"its {name} has no {', '.join(lacking)}"
    if one.made and (asked := tree.needs_of(module, name).difference(one.has)):
        yield f"its {name} needs {', '.join(sorted(asked))}"


def is_tried(version: str) -> bool:
    first, beyond = TRIED
    return first <= _parse_release(version) < beyond


def tried_releases() -> str:
    (_, first), (_, beyond) = TRIED
    return f"0.{first} to 0.{beyond - 1}"


def _parse_release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, "0.26.0+cu130": (0, 26); empty if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
