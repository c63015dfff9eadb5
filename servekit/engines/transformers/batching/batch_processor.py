"""The library's batch processor with its paged cache, scheduler and batch buffers.

Written for transformers 5.17 and 5.23, whose differences are handled here, in `paged_attention` and
in `decode.page_table`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.distributed import DistributedHelper

from servekit.engines.transformers.batching import hooks
from servekit.engines.transformers.batching import scheduler as groups
from servekit.engines.transformers.batching.kv_cache import Plan
from servekit.engines.transformers.batching.lazy_zeros import LazyZeros

_FIELDS = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}


def manager(model: PreTrainedModel, plan: Plan, *, ranks: int = 1) -> Any:
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
        made.distributed_helper = _Part(ranks, getattr(model, "tp_plan", {}))
    return made


def create(made: Any) -> Any:
    """Return a processor with an empty cache. Raises MemoryError, torch.OutOfMemoryError."""
    with LazyZeros():
        processor = made._create_batch_processor()
    processor.model_runner._sample = hooks.choose
    processor.cache.layout = None  # of a step; read by `paged_attention`
    return processor


def capacity(cache: Any, plan: Plan) -> int:
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
