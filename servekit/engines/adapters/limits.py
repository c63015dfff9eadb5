"""What of an adapter can be refused by its configuration, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from servekit.engines.adapters.files import PARAM, AdapterFiles
from servekit.errors import RequestError

#: Highest rank served unless the configuration says otherwise.
MAX_RANK = 256
#: Tuners whose layers need what a request cannot say, or keep state of their own per sequence.
_REFUSED = {
    "PREFIX_TUNING": "it puts keys and values of its own into the cache of every layer",
    "CARTRIDGE": "it puts keys and values of its own into the cache of every layer",
    "ADAPTION_PROMPT": "it replaces the attention that continuous batching replaces too",
    "MULTITASK_PROMPT_TUNING": "it needs a task id with every request",
    "POLY": "it needs task ids with every request",
    "XLORA": "it reads each prompt twice, with adapters of its own",
}


def check(files: AdapterFiles, max_rank: int) -> None:
    """Raise RequestError if this kind of adapter is not served, or its rank is too high."""
    config = files.config
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        raise RequestError("adapter_config.json states no peft_type.", param=PARAM)
    if kind in _REFUSED:
        raise RequestError(f"{kind} adapters are not served: {_REFUSED[kind]}.", param=PARAM)
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise RequestError(
            f"The adapter is for the task {task}; this model needs one for CAUSAL_LM.", param=PARAM
        )
    if config.get("layer_replication"):
        raise RequestError(
            "The adapter repeats layers of its base (layer_replication); that is another model, "
            "and is not served as an adapter.",
            param=PARAM,
        )
    stated = config.get("r")
    if stated is not None and (not isinstance(stated, int) or isinstance(stated, bool)):
        raise RequestError(
            f"The adapter's rank (r) has to be a whole number, not {stated!r}.", param=PARAM
        )
    rank = rank_of(config)
    if rank > max_rank:
        raise RequestError(
            f"The adapter's rank is {rank}, and at most {max_rank} is served "
            "(the model's option max_lora_rank).",
            param=PARAM,
        )


def rank_of(config: dict[str, Any]) -> int:
    """The highest rank in an adapter's configuration; 0 where its tuner has none."""
    return max(_ranks(config), default=0)


def _ranks(config: dict[str, Any]) -> Iterator[int]:
    patterns = config.get("rank_pattern")
    stated = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    yield from (rank for rank in stated if isinstance(rank, int) and not isinstance(rank, bool))


def require_base(config: dict[str, Any], names: set[str], base: str) -> None:
    """Raise RequestError if the adapter names another base; `base` is what to call this one.

    Models of one family have the same shapes, so that these alone do not tell them apart. Folders
    move and models are renamed, too: whoever knows better says so.
    """
    if stated := other_base(config, names):
        raise RequestError(
            f"The adapter was made for {stated} (its base_model_name_or_path), and this model is "
            f"{base}. If that is the same base by another name, load it with any_base.",
            param=PARAM,
        )


def other_base(config: dict[str, Any], names: set[str]) -> str:
    """The base that the adapter names, if it is none of `names` by its last part; else ""."""
    stated = config.get("base_model_name_or_path")
    if not isinstance(stated, str) or not stated:
        return ""
    wanted, known = _last(stated), {_last(name) for name in names if name}
    converted = any(n.endswith(".gguf") and n.startswith(wanted) for n in known)  # NAME.Q4_1.gguf
    return "" if converted or wanted in known else stated


def _last(name: str) -> str:
    return PurePosixPath(name.rstrip("/")).name.lower()
