"""Checks of an adapter's configuration, before any of its weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from servekit.engines.transformers.lora.adapter_files import PARAM, AdapterFiles
from servekit.errors import RequestError

#: Highest rank served unless the configuration sets another.
MAX_RANK = 256
#: Tuners proved by tests, which serve one adapter of each and compare it with PEFT's output. An
#: adapter is untrusted data, and other tuners of PEFT may load a model that the adapter names.
PROVED = frozenset(
    {
        *("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "PVERA", "HRA"),
        *("HIRA", "FOURIERFT", "WAVEFT", "RANDLORA", "VBLORA", "C3A", "DELORA", "SHIRA", "PSOFT"),
        *("GRALORA", "TINYLORA", "UNILORA", "LN_TUNING", "MISS", "ROAD", "GLORA", "BEFT", "PEANUT"),
        *("DEFT", "FROD", "OSF", "PROMPT_TUNING", "P_TUNING", "CPT", "TRAINABLE_TOKENS"),
    }
)
#: Configuration fields that name code or files; serving needs none of them.
_NAMING = {
    "megatron_config": "code of Megatron's",
    "corda_config": "files to begin a training with",
    "lora_ga_config": "files to begin a training with",
    "arrow_config": "other adapters",
}
#: Initialisations of LoRA from data or files that change the base.
_MADE_OF_DATA = ("corda", "lora_ga", "loftq")
#: Tuners whose layers need input that a request cannot carry, or keep state per sequence.
_REFUSED = {
    "PREFIX_TUNING": "it puts keys and values of its own into the cache of every layer",
    "CARTRIDGE": "it puts keys and values of its own into the cache of every layer",
    "ADAPTION_PROMPT": "it replaces the attention that continuous batching replaces too",
    "MULTITASK_PROMPT_TUNING": "it needs a task id with every request",
    "POLY": "it needs task ids with every request",
    "XLORA": "it reads each prompt twice, with adapters of its own",
    "SHADOW": "it loads a second model, which it names itself",
}


def check_config(files: AdapterFiles, max_rank: int) -> None:
    """Raise RequestError if this kind of adapter is not served, or its rank is too high."""
    config = files.config
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        raise RequestError("adapter_config.json states no peft_type.", param=PARAM)
    if kind in _REFUSED:
        raise RequestError(f"{kind} adapters are not served: {_REFUSED[kind]}.", param=PARAM)
    if kind not in PROVED:
        raise RequestError(
            f"{kind} adapters are not served: no test has proved that tuner. Those that are: "
            f"{', '.join(sorted(PROVED))}.",
            param=PARAM,
        )
    _check_names(config)
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


def _check_names(config: dict[str, Any]) -> None:
    """Raise RequestError for a configuration that makes PEFT load files or code."""
    for field, what in _NAMING.items():
        if config.get(field):
            raise RequestError(
                f"The adapter's configuration names {what} ({field}). Nothing but its own files "
                "is loaded: remove that field, or save the adapter as a plain LoRA.",
                param=PARAM,
            )
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_MADE_OF_DATA):
        raise RequestError(
            f"The adapter was initialised with {initial} (init_lora_weights), from data that is"
            " not "
            "here. Convert it to a plain LoRA: save_pretrained with "
            "path_initial_model_for_weight_conversion.",
            param=PARAM,
        )


def rank_of(config: dict[str, Any]) -> int:
    """Return the highest rank in an adapter's configuration; 0 if its tuner has none."""
    return max(_stated_ranks(config), default=0)


def _stated_ranks(config: dict[str, Any]) -> Iterator[int]:
    patterns = config.get("rank_pattern")
    stated = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    yield from (rank for rank in stated if isinstance(rank, int) and not isinstance(rank, bool))


def require_base(config: dict[str, Any], names: set[str], base: str) -> None:
    """Raise RequestError if the adapter names another base; `base` is this model's display name.

    Models of one family have the same shapes, so shapes alone do not tell them apart. Folders move
    and models are renamed: the user can override this check with `any_base`.
    """
    if stated := other_base(config, names):
        raise RequestError(
            f"The adapter was made for {stated} (its base_model_name_or_path), and this model is "
            f"{base}. If that is the same base by another name, load it with any_base.",
            param=PARAM,
        )


def other_base(config: dict[str, Any], names: set[str]) -> str:
    """Return the base that the adapter names, or "" if its last path component is in `names`."""
    stated = config.get("base_model_name_or_path")
    if not isinstance(stated, str) or not stated:
        return ""
    wanted, known = _last_part(stated), {_last_part(name) for name in names if name}
    converted = any(n.endswith(".gguf") and n.startswith(wanted) for n in known)  # NAME.Q4_1.gguf
    return "" if converted or wanted in known else stated


def _last_part(name: str) -> str:
    return PurePosixPath(name.rstrip("/")).name.lower()
