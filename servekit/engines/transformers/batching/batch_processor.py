"""The library's batch processor with its paged cache, scheduler and batch buffers.

Our choice of tokens replaces the library's, and its output queue is not used.

Written for transformers 5.17, 5.23 and 5.24, whose differences are handled here, in
`paged_attention` and in `decode.page_table`.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.distributed import DistributedHelper

from servekit.engines.transformers.batching import paged_attention
from servekit.engines.transformers.batching import scheduler as groups
from servekit.engines.transformers.batching.kv_cache import CachePlan
from servekit.engines.transformers.decode.page_table import hand_over
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.sampling import Sampler, best_tokens

#: Smaller tensors of zeros are created as usual.
LEAST_LAZY_BYTES = 2**20
#: Names in a plan of tensor parallelism by which the library knows that a rank has a part of them.
_KV = ("layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj")
_FIELDS = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}


def make_manager(model: PreTrainedModel, plan: CachePlan, *, ranks: int = 1) -> Any:
    """Return the library's manager for this model, for the use of its parts without its thread.

    With several `ranks`, the cache that it creates is this rank's part.
    """
    options: dict[str, Any] = {
        "num_blocks": plan.blocks + 2,  # 5.17 allocates up to two blocks more than a request fills
        "max_batch_tokens": plan.batch_tokens,
        "max_requests_per_batch": plan.slots,
        "max_memory_percent": 1.0,  # servekit computes the size
        "max_blocks_per_request": 0,
        "allow_block_sharing": True,
        "use_async_batching": False,
        "use_cuda_graph": False,
        "auto_switch_to_flash": False,
        "page_size": plan.block_size,
        "scheduler_type": groups.NAME,
    }
    if "page_size" not in _FIELDS:
        options["block_size"] = plan.block_size
    config = ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in _FIELDS})
    attention = model.config._attn_implementation
    if "auto_switch_to_flash" not in _FIELDS and attention in ("sdpa", "eager"):
        # Otherwise 5.17 would ask the hub for a flash kernel if `kernels` is installed.
        model.set_attn_implementation(f"paged|{attention}")
    library: Any = model
    greedy: Any = GenerationConfig
    made = library.init_continuous_batching(
        generation_config=greedy(do_sample=False, eos_token_id=-1),
        continuous_batching_config=config,
    )
    if ranks > 1:
        divided = getattr(model, "tp_plan", {})
        # The library looks for keys and values by their names in models of text only.
        divided |= {
            name: how for full, how in divided.items() for name in _KV if full.endswith(name)
        }
        made.distributed_helper = _Part(ranks, divided)
    return made


def create_processor(made: Any) -> Any:
    """Return a processor with an empty cache. Raises MemoryError, torch.OutOfMemoryError."""
    with LazyZeros():
        processor = made._create_batch_processor()
    processor.model_runner._sample = take_best
    cache = processor.cache
    cache.layout = None  # of a step; read by `paged_attention`
    cache.layers = ()  # 5.24's Mllama looks there for the keys and values of images
    own = made.model.config._attn_implementation == paged_attention.NAME
    if own and hasattr(cache, "layer_to_allocator"):  # older ones are written by their `update`
        cache.update = partial(hand_over, cache)
    return processor


def request_capacity(cache: Any, plan: CachePlan) -> int:
    """Return the number of tokens that a single request can have in the cache."""
    groups = getattr(cache, "num_groups", 1)
    return int(plan.tokens // groups)


class _Part(DistributedHelper):
    """A rank's stand-in for the library's distributed helper, which never communicates.

    The rank has its part of the heads. In the library all ranks would schedule alike, and agree on
    every step in collectives, over pickled objects. Here rank 0 schedules for all, and sizes are
    the same everywhere.
    """

    def __init__(self, ranks: int, plan: dict[str, str]) -> None:
        self.dist_on = True
        self.device_mesh = None
        self.tp_plan = plan
        self.tp_size = ranks
        group: Any = None
        self.tp_group = self.cpu_comm_group = group
        self.tp_root_global_rank = self.tp_local_rank = self.global_rank = self.dp_rank = 0
        self.world_size, self.dp_size = ranks, 1
        self.is_tp_driver = True

    def tp_broadcast_from_rank_0(self, value: Any) -> Any:
        return value

    def tp_all_reduce_min(self, value: Any, on_cpu: bool = False) -> Any:
        return value

    def tp_all_reduce_state(self, *said: Any, **also: Any) -> Any:
        return (*said, *also.values())

    def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
        return obj


# ---------------------------------------------------------------- hooks


class Discard(OutputRouter):
    """An output router that drops all outputs; tokens are read from the requests' states."""

    def deliver(self, output: Any) -> None:
        return None

    def deliver_batch(self, outputs: Any) -> None:
        return None


def take_best(scores: Tensor, output_ids: Tensor) -> None:
    """Take the best tokens; replaces the library's `ModelRunner._sample`.

    `scores` is [1, requests, vocabulary] float32; ids are written to the start of `output_ids[0]`.
    """
    tokens = best_tokens(scores[0])
    output_ids[0, : len(tokens)].copy_(tokens)


class SamplingHook(ContinuousBatchingLogitsProcessorList):
    """A caller of our sampler, in place of the library's logits processors.

    The library itself takes the argmax. It does not call this object if `do_processing` is false,
    so a batch of plain greedy rows costs nothing.
    """

    def __init__(self) -> None:
        super().__init__(LogitsProcessorList())
        self.rows: dict[str, Row] = {}
        self._batch: list[Row] = []
        self._sampler = Sampler()

    def prepare_tensor_args(self, requests_in_batch: Sequence[Any], arg_storage: Any) -> Any:
        """Record the rows whose logits follow, in order."""
        self._batch = [
            self.rows[future.state.request_id]
            for future in requests_in_batch
            if future.has_new_token
        ]
        self.do_processing = not all(row.plain for row in self._batch)
        return arg_storage

    def drop_rows(self) -> None:
        """Drop the last batch's rows, which hold references to their adapters."""
        self._batch = []

    def __call__(self, input_ids: Any, scores: Any, logits_processor_args: Any) -> Any:
        for row, logits in zip(self._batch, scores, strict=False):
            if row.noted is not None:
                row.noted.append(logits.clone())
        self._sampler.apply(self._batch, scores[: len(self._batch)])
        return scores


# ---------------------------------------------------------------- memory of the cache on a CPU


class LazyZeros(TorchFunctionMode):
    """A context in which large flat byte tensors of zeros on a CPU are lazy, in this thread.

    `torch.zeros` writes every page of its memory. A cache is sized for the maximum that its slots
    could use, so this took a large part of a small model's load time, and memory that most workers
    never need. With a mapping, the kernel provides zero pages at their first use, and takes all
    back with the tensor. `calloc` would not do, since it may reuse free heap memory and write zeros
    to it.
    """

    def __torch_function__(  # type: ignore[no-untyped-def]
        self,
        func: Callable[..., Any],
        types,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and _is_lazy(args, kwargs):
            return torch.frombuffer(
                _map_pages(args[0]), dtype=torch.uint8
            )  # keeps the mapping alive
        return func(*args, **kwargs)


def _map_pages(size_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)  # as in NumPy: fewer page faults, and faster attention
    return pages


def _is_lazy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) != 1 or not isinstance(args[0], int) or args[0] < LEAST_LAZY_BYTES:
        return False
    if kwargs.keys() - {"dtype", "device"} or kwargs.get("dtype") is not torch.uint8:
        return False
    return torch.device(kwargs.get("device") or "cpu").type == "cpu"
