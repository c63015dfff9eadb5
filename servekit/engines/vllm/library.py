"""The parts of vLLM that servekit uses, and the tested releases.

`REQUIRED` is checked when a model is loaded. A release outside of `TRIED` that has all of it is
used with a warning; one that lacks something is refused with an error that names it. Code that runs
inside the core's processes is checked in vLLM's source files, because importing it takes seconds.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog

from servekit.errors import LoadError

log: Any = structlog.get_logger(__name__)

#: The first tested release, and the first untested one; pyproject.toml says the same.
TRIED = ((0, 26), (0, 33))
INSTALL = "pip install 'servekit[vllm]'"


@dataclass(frozen=True, slots=True)
class Required:
    """A class or function of vLLM, and the parts of it that servekit uses."""

    at: str  # module:name
    #: Fields, methods and attributes of a class; parameters of a function.
    has: tuple[str, ...] = ()
    #: It belongs to the core's processes: its source file is parsed, not imported.
    inside: bool = False


REQUIRED = (
    Required(
        "vllm.engine.arg_utils:EngineArgs",
        (
            *("model", "runner", "dtype", "max_model_len", "trust_remote_code", "load_format"),
            *("tensor_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes"),
            *("enable_prefix_caching", "enforce_eager", "enable_sleep_mode", "quantization"),
            *("structured_outputs_config", "distributed_executor_backend", "disable_log_stats"),
            *("max_num_seqs", "max_num_batched_tokens", "enable_lora", "max_loras"),
            *("max_cpu_loras", "max_lora_rank", "create_engine_config"),
        ),
    ),
    Required("vllm.config:VllmConfig", ("scheduler_config", "parallel_config", "instance_id")),
    Required("vllm.config:SchedulerConfig", ("async_scheduling", "scheduler_cls", "max_num_seqs")),
    Required("vllm.config:ParallelConfig", ("worker_cls",)),
    Required("vllm.config:ModelConfig", ("runner",)),
    Required("vllm.usage.usage_lib:UsageContext", ("OPENAI_API_SERVER",)),
    Required("vllm.v1.executor:Executor", ("get_class",)),
    Required(
        "vllm.v1.engine.core_client:SyncMPClient",
        (
            *("vllm_config", "executor_class", "log_stats"),
            *("add_request", "abort_requests", "shutdown", "_send_input"),
        ),
    ),
    Required("vllm.v1.engine.core_client:BackgroundResources", ("engine_manager", "engine_dead")),
    Required("vllm.v1.engine:EngineCoreRequestType", ("UTILITY",)),
    Required(
        "vllm.v1.engine:EngineCoreRequest",
        (
            *("request_id", "prompt_token_ids", "mm_features", "sampling_params"),
            *("pooling_params", "arrival_time", "lora_request", "cache_salt"),
            "data_parallel_rank",
        ),
    ),
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
    ),
    Required(
        "vllm.v1.sample.ops.bad_words:_apply_bad_words_single_batch",
        ("logits", "bad_words_token_ids", "past_tokens_ids"),
    ),
    Required("vllm.sampling_params:StructuredOutputsParams", ("regex",)),
    Required("vllm.pooling_params:PoolingParams", ("task",)),
    Required("vllm.lora.request:LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    Required("vllm.v1.core.sched.scheduler:Scheduler", ("__init__",), inside=True),
    Required("vllm.v1.core.sched.async_scheduler:AsyncScheduler", inside=True),
    Required("vllm.v1.structured_output:StructuredOutputManager", ("_create_grammar",), True),
    Required("vllm.v1.structured_output.backend_guidance:GuidanceBackend", inside=True),
    Required(
        "vllm.v1.structured_output.backend_guidance:GuidanceGrammar",
        ("ll_matcher", "ll_tokenizer", "vocab_size", "accept_tokens"),
        inside=True,
    ),
    Required(
        "vllm.v1.worker.gpu_worker:Worker",
        ("__init__", "load_model", "execute_model", "sample_tokens"),
        inside=True,
    ),
    Required("vllm.v1.worker.cpu_worker:CPUWorker", inside=True),
    Required("vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler", ("forward_native",), True),
    Required(
        "vllm.v1.worker.gpu.sample.bad_words:BadWordsState",
        ("__init__", "add_request", "apply_staged_writes"),
        True,
    ),
    Required(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner", ("_get_prompt_logprobs_dict",), True
    ),
    Required(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin", ("_set_active_loras",), True
    ),
    Required(
        "vllm.device_allocator.cumem:CuMemAllocator", ("get_instance", "get_current_usage"), True
    ),
)


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def is_for_cpus() -> bool:
    """Return whether the installed vLLM was built for CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def check_library() -> None:
    """Raise LoadError unless the installed vLLM can be used; warn if it is untested."""
    try:
        here = vllm_version()
    except ImportError as error:
        raise LoadError(f"vLLM cannot be imported: {error}. {INSTALL}") from error
    lacking = [sentence for one in REQUIRED for sentence in find_missing(one)]
    if lacking:
        raise LoadError(
            f"vLLM {here} cannot be used: {'; '.join(lacking[:3])}. servekit was tried with "
            f"{_tried_releases()}: {INSTALL} brings one of them."
        )
    if not is_tried(here):
        log.warning("vllm_version_untested", version=here, tested=_tried_releases())


def is_tried(here: str) -> bool:
    first, beyond = TRIED
    return first <= _parse_release(here) < beyond


def _tried_releases() -> str:
    (_, first), (_, beyond) = TRIED
    return f"0.{first} to 0.{beyond - 1}"


def _parse_release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (0, 32) for "0.32.0+cpu"."""
    numbers = text.split("+")[0].split(".")[:2]
    return tuple(int(number) if number.isdecimal() else 0 for number in numbers)


def find_missing(one: Required) -> Iterator[str]:
    """Yield an error text for each missing part."""
    module, _, name = one.at.partition(":")
    try:
        known = _source_members(module, name) if one.inside else _imported_members(module, name)
    except (ImportError, AttributeError, OSError) as error:
        yield f"it has no {module}.{name} ({error})"
        return
    if lacking := [part for part in one.has if part not in known]:
        yield f"its {name} has no {', '.join(lacking)}"


def _imported_members(module: str, name: str) -> Collection[str]:
    """Return the attributes, fields and parameters of a class or function."""
    found: Any = getattr(importlib.import_module(module), name)
    fields = {
        *getattr(found, "__dataclass_fields__", ()),
        *getattr(found, "__struct_fields__", ()),
    }
    try:
        parameters = set(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # it has no readable signature
        parameters = set()
    return {*dir(found), *fields, *parameters}


def _source_members(module: str, name: str) -> Collection[str]:
    """Return the members of a class from its source, without inherited ones."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError("there is no such module")
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return set(_class_members(node))
    raise AttributeError("there is no such class")


def _class_members(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
