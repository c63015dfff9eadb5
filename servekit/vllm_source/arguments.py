"""The names of vLLM's engine arguments: those of a release, and those that servekit sets itself."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from servekit.vllm_source.reader import SourceTree

_HOME = ("vllm.engine.arg_utils", "EngineArgs")
_REPLICAS = "write the model's `replicas` instead"
_GPUS = "write the model's `gpus_per_replica` instead"
_TOKENIZER = "servekit tokenizes itself, with the tokenizer in the model's `path`"
_FETCHES = "servekit fetches the files itself, as the model's `path` and `revision` say"
#: Arguments that servekit sets itself, each with the way to say the same to servekit.
OWN: Mapping[str, str] = {
    "model": "write the model's `path` instead",
    "served_model_name": "write the model's `name` and `aliases` instead",
    "runner": "the files in the model's `path` say whether it embeds",
    "tokens_only": _TOKENIZER,
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "skip_tokenizer_init": _TOKENIZER,
    "revision": "write the model's `revision` instead",
    "code_revision": "write the model's `revision` instead",
    "download_dir": _FETCHES,
    "hf_token": "set HF_TOKEN in the environment of `servekit up`",
    "trust_remote_code": "write the model's `trust_remote_code` instead",
    "dtype": "write the model's `dtype` instead",
    "max_model_len": "write the model's `max_context` instead",
    "gpu_memory_utilization": "write the model's `memory` instead",
    "kv_cache_memory_bytes": "write `kv_cache_bytes` in `options` instead",
    "max_num_seqs": "write `slots` in `options` instead",
    "max_num_batched_tokens": "write `max_batch_tokens` in `options` instead",
    "enable_prefix_caching": "write `prefix_caching` in `options` instead",
    "load_format": "write `load_format` in `options` instead",
    "enforce_eager": "write `enforce_eager` in `options` instead",
    "enable_lora": "write the model's `adapters`, or `max_loras` in `options`, instead",
    "max_loras": "write `max_loras` in `options` instead",
    "max_lora_rank": "write `max_lora_rank` in `options` instead",
    "enable_sleep_mode": "write the model's `idle_sleep_s` instead",
    "generation_config": "write the model's `sampling` instead",
    "override_generation_config": "write the model's `sampling` instead",
    "reasoning_parser": "write the model's `reasoning_parser` instead",
    "structured_outputs_config": "servekit compiles grammars itself",
    "disable_log_stats": "servekit reads vLLM's statistics",
    "tensor_parallel_size": _GPUS,
    "device_ids": "write the model's `gpus` instead",
    "distributed_executor_backend": "it follows from the model's `gpus_per_replica`",
    "worker_cls": "servekit brings a worker class of its own; `worker_extension_cls` adds to it",
    "scheduler_cls": "servekit brings a scheduler of its own",
    "nnodes": "servekit keeps a replica on one machine",
    "node_rank": "servekit keeps a replica on one machine",
    "master_addr": "servekit keeps a replica on one machine",
    "master_port": "servekit keeps a replica on one machine",
}
#: Arguments without effect on the text: workers that differ in them can continue each other's
#: answers.
NEUTRAL = frozenset(
    {
        *("use_tqdm_on_load", "max_parallel_loading_workers", "safetensors_load_strategy"),
        *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
        *("num_gpu_blocks_override", "prefix_caching_hash_algo", "max_cpu_loras"),
        *("kv_events_config", "kv_offloading_size", "kv_offloading_backend", "cpu_offload_gb"),
        *("scheduling_policy", "long_prefill_token_threshold", "max_num_partial_prefills"),
        *("max_long_partial_prefills", "async_scheduling", "stream_interval", "max_logprobs"),
        *("otlp_traces_endpoint", "collect_detailed_traces", "show_hidden_metrics_for_version"),
        *("kv_cache_metrics", "kv_cache_metrics_sample", "cudagraph_metrics", "enable_mfu_metrics"),
        *("enable_layerwise_nvtx_tracing", "enable_logging_iteration_details", "log_level"),
        *("aggregate_engine_logging", "profiler_config", "shutdown_timeout", "numa_bind"),
        *(
            "numa_bind_nodes",
            "numa_bind_cpus",
            "distributed_timeout_seconds",
            "mm_processor_cache_gb",
        ),
    }
)


def normalize_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by their names in Python: `--kv-cache-dtype` is `kv_cache_dtype`.

    Raises ValueError if a name stands twice.
    """
    made: dict[str, Any] = {}
    for name, value in arguments.items():
        if (known := normalize_name(name)) in made:
            raise ValueError(f"{known} stands twice")
        made[known] = value
    return made


def normalize_name(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def explain_own(name: str) -> str:
    """Return a sentence about an argument that servekit sets itself; "" for any other."""
    name = normalize_name(name)
    how = OWN.get(name) or (_REPLICAS if name.startswith("data_parallel_") else "")
    return f"servekit sets {name} itself: {how}." if how else ""


def explain_unknown(name: str, known: Collection[str], version: str) -> str:
    """Return a sentence about an argument that vLLM does not have; "" for one of `known`."""
    name = normalize_name(name)
    if name in known:
        return ""
    near = difflib.get_close_matches(name, [*known, *OWN], n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"vLLM {version} has no engine argument {name}{hint}"


def read_arguments(root: Path) -> tuple[str, ...]:
    """Return the arguments of the vLLM below `root`, a folder of packages; none if unreadable."""
    try:
        changed_ns = root.joinpath("vllm", "engine", "arg_utils.py").stat().st_mtime_ns
    except OSError:
        return ()
    return _read_arguments(root, changed_ns)


@lru_cache(maxsize=16)
def _read_arguments(root: Path, _changed_ns: int) -> tuple[str, ...]:
    try:
        fields: Iterable[str] = SourceTree(root).fields_of(*_HOME)
    except LookupError:
        return ()
    return tuple(name for name in fields if not name.startswith("_"))
