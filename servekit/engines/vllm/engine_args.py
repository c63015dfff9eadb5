"""The arguments of vLLM (`vllm.EngineArgs`), derived from a WorkerSpec."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from servekit.engines.transformers.batching import kv_cache
from servekit.engines.transformers.pooling_models.logit_score import (
    find_score_tokens,
    read_activation,
)
from servekit.errors import LoadError
from servekit.model_metadata import kv_cache_shape
from servekit.model_metadata.weight_quantization import OF_VLLM
from servekit.protocol.messages import WorkerSpec
from servekit.system import cgroup
from servekit.units import format_bytes
from servekit.vllm_source import arguments

#: Memory of a process on a GPU that vLLM does not count: the CUDA context with its modules, and the
#: buffers of NCCL with several GPUs.
OVERHEAD_BYTES = 3 * 2**28
NCCL_BYTES = 2**30
#: Upper limit of the fraction of a GPU; the rest is for other processes and for memory peaks.
SHARE = 0.95
#: LoRA adapters in one batch, if the configuration names adapters but no number.
LORAS = 8
#: KV cache on a CPU for a model whose cache size per token is unknown.
CPU_CACHE_BYTES = 2**30
#: Tokens of one pass on a CPU, by vLLM's default.
CPU_BATCH_TOKENS = 2048


def engine_arguments(
    spec: WorkerSpec, folder: Path, memory: tuple[int, int], *, embeds: bool
) -> dict[str, Any]:
    """Return keyword arguments for `vllm.EngineArgs`.

    `memory` is the total and free memory, in bytes, of the worker's smallest GPU, or of the host
    for a worker on the CPU. Raises LoadError if the worker's share of the memory is too small.
    """
    made = _common_arguments(spec, folder, embeds=embeds)
    made |= _on_cpu(spec, folder, memory[1]) if spec.device == "cpu" else _on_gpus(spec, memory)
    options = spec.options
    asked: str | None = options.get("quantization")
    cache = options.get("cache_type", "auto")
    given = {
        "kv_cache_dtype": None if cache == "auto" else cache,
        "max_num_seqs": options.get("slots"),
        "max_num_batched_tokens": options.get("max_batch_tokens"),
        "kv_cache_memory_bytes": options.get("kv_cache_bytes"),
        "quantization": asked and OF_VLLM.get(asked, asked),
        "enforce_eager": options.get("enforce_eager"),
    }
    made |= {name: value for name, value in given.items() if value is not None}
    return made | lora_arguments(spec, embeds=embeds)


def passed_arguments(spec: WorkerSpec) -> dict[str, Any]:
    """Return the arguments of the option `engine_args`. Raises LoadError for those of servekit.

    `check` refuses them first, unless the model is checked on another machine.
    """
    passed: dict[str, Any] = spec.options.get("engine_args") or {}
    for name in passed:
        if sentence := arguments.explain_own(name):
            raise LoadError(sentence)
    return passed


def reranker_overrides(folder: Path, tokenizer: Any, spec: WorkerSpec) -> dict[str, Any]:
    """Return what vLLM's `hf_overrides` need to make a classifier of a causal reranker.

    Raises LoadError if the files name tokens that the tokenizer has not.
    """
    tokens = find_score_tokens(folder, tokenizer, spec.model)
    pair = [one for one in (tokens.false_token_id, tokens.true_token_id) if one is not None]
    [architecture] = json.loads((folder / "config.json").read_bytes())["architectures"][:1]
    activation = read_activation(folder)
    return {
        "architectures": [architecture.replace("ForCausalLM", "ForSequenceClassification")],
        "classifier_from_token": tokenizer.convert_ids_to_tokens(pair),
        "method": "from_2_way_softmax" if len(pair) == 2 else "no_post_processing",
    } | ({"sentence_transformers": {"activation_fn": activation}} if activation else {})


def _count_stages(spec: WorkerSpec) -> int:
    """Return the number of pipeline stages. Raises LoadError if they do not divide the GPUs."""
    stages = passed_arguments(spec).get("pipeline_parallel_size", 1)
    if not isinstance(stages, int) or stages < 1 or spec.gpus % stages:
        raise LoadError(
            f"pipeline_parallel_size is {stages!r}, and has to divide the GPUs of a replica "
            f"(gpus_per_replica: {spec.gpus})."
        )
    return stages


def inspect_model(spec: WorkerSpec, folder: Path) -> None:
    """Let vLLM inspect the model's class, in an interpreter of its own, and remember the result."""
    from vllm.engine.arg_utils import EngineArgs

    with contextlib.suppress(Exception):  # the load says what is wrong
        EngineArgs(**_common_arguments(spec, folder, embeds=False)).create_model_config()


def _common_arguments(spec: WorkerSpec, folder: Path, *, embeds: bool) -> dict[str, Any]:
    options = spec.options
    return {
        "model": str(folder),
        "runner": "pooling" if embeds else "generate",
        "max_model_len": spec.max_context or -1,  # -1: the longest that fits
        "trust_remote_code": spec.trust_remote_code,
        "tensor_parallel_size": spec.gpus // _count_stages(spec),
        "enable_prefix_caching": bool(options.get("prefix_caching", True)) and not embeds,
        "load_format": options.get("load_format", "auto"),
        "structured_outputs_config": {"backend": "guidance"},
        "disable_log_stats": False,  # the statistics contain the load
        "mm_processor_cache_gb": 0,  # else this memory is taken twice, here and in the core
    }


def _on_gpus(spec: WorkerSpec, memory: tuple[int, int]) -> dict[str, Any]:
    return {
        "dtype": spec.dtype,
        "gpu_memory_utilization": gpu_utilization(spec, *memory),
        "enforce_eager": False,
        "enable_sleep_mode": spec.sleeps,
        "distributed_executor_backend": "mp" if spec.gpus > 1 else "uni",
    }


def _on_cpu(spec: WorkerSpec, folder: Path, free_bytes: int) -> dict[str, Any]:
    """Return arguments for a CPU, like the transformers engine's: float32, few slots, small cache.

    Compilation is off: it needs a C++ compiler and a minute, for little gain. Sleep mode does not
    exist there, and vLLM runs the model in a process of its own.
    """
    return {
        "dtype": "float32" if spec.dtype == "auto" else spec.dtype,
        "max_num_seqs": kv_cache.CPU_SLOTS,
        "enforce_eager": True,
        "kv_cache_memory_bytes": cpu_cache_bytes(spec, folder, free_bytes),
        "distributed_executor_backend": "mp",
    }


def cpu_cache_bytes(spec: WorkerSpec, folder: Path, free_bytes: int) -> int:
    """Return the KV cache size for all slots or one full context, limited by free memory."""
    room = int(min(free_bytes, spec.host_memory_bytes or free_bytes) * kv_cache.CPU_FRACTION)
    try:
        shape = kv_cache_shape.of_config(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError):  # recurrent, or of an unknown type
        return min(room, CPU_CACHE_BYTES)
    context = spec.max_context or shape.max_context
    slots = spec.options.get("slots") or kv_cache.CPU_SLOTS
    # rounded up: vLLM's blocks on a CPU have 128 tokens, and the last one is never full
    batch = spec.options.get("max_batch_tokens") or CPU_BATCH_TOKENS
    wide = replace(shape, window=shape.window + batch + 2 * 128)  # a pass is stored whole
    short = slots * kv_cache.CPU_TOKENS_PER_SLOT * shape.numbers(1024, latent=True) // 1024
    number = 4 if spec.dtype in ("auto", "float32") else 2
    return min(room, max(short, wide.numbers(context + 2 * 128, latent=True)) * number)


def lora_arguments(spec: WorkerSpec, *, embeds: bool) -> dict[str, Any]:
    """Return the arguments for LoRA; empty if the model takes no adapters."""
    slots = spec.options.get("max_loras") or (LORAS if spec.adapters else 0)
    if not slots or embeds:
        return {}
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": max(slots, 256),  # a capacity, not memory; beyond it adapters are reread
        "max_lora_rank": spec.options.get("max_lora_rank", 64),
    }


def gpu_utilization(spec: WorkerSpec, total_bytes: int, free_bytes: int) -> float:
    """Return the fraction of a GPU for weights, activations and KV cache. Raises LoadError."""
    overhead = OVERHEAD_BYTES + (NCCL_BYTES if spec.gpus > 1 else 0)
    claim = min(spec.memory_bytes or total_bytes, int(total_bytes * SHARE))
    room = min(claim, free_bytes) - overhead
    if room <= 0:
        raise LoadError(
            f"{spec.model} may take {format_bytes(claim)} of its GPU, of which "
            f"{format_bytes(free_bytes)} are free, and vLLM needs {format_bytes(overhead)} "
            "for itself alone.",
            permanent=claim <= overhead,
        )
    return room / total_bytes


def device_memory(spec: WorkerSpec) -> tuple[int, int]:
    """Return total and free bytes of the worker's device. Raises LoadError if it has no GPU."""
    if spec.device == "cpu":
        free = cgroup.available_memory_bytes()
        return free, free
    return memory_of(os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def memory_of(visible: str) -> tuple[int, int]:
    """Return total and free bytes of the smallest GPU in `visible`, a CUDA_VISIBLE_DEVICES value.

    Uses NVML, which creates no CUDA context in this process. Raises LoadError if there is no GPU.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            found = [
                pynvml.nvmlDeviceGetMemoryInfo(_gpu_handle(entry)) for entry in visible.split(",")
            ]
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, ValueError) as error:
        raise LoadError(f"vLLM needs a GPU, and NVML says of {visible!r}: {error}") from error
    return min(int(one.total) for one in found), min(int(one.free) for one in found)


def _gpu_handle(entry: str) -> Any:
    import pynvml

    if entry.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(entry))
    return pynvml.nvmlDeviceGetHandleByUUID(entry)
