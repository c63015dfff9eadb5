"""Check that the CPU models fit into this machine's memory, as far as their claims are known.

Models loaded on start have to fit side by side, each model loaded on demand beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.memory_requests import Misplaced, host_claim_bytes
from servekit.supervisor.scheduling.placement import Assignment
from servekit.units import format_bytes


def check(models: Sequence[ModelConfig], places: Sequence[Assignment], total_bytes: int) -> None:
    """Raise Misplaced, with the arithmetic, for the first model that does not fit.

    Models loaded on start come first. A `total_bytes` of 0 means unknown, and nothing is checked.
    """
    if not total_bytes:
        return
    rows = [(index, m, _claim(m, places, total_bytes)) for index, m in enumerate(models)]
    beside: list[tuple[str, int]] = []
    for index, model, claim in sorted(rows, key=lambda row: not _stays(row[1])):
        _fit(index, model, claim, beside, total_bytes)
        if _stays(model) and claim:
            beside.append((model.name, claim))


def _fit(
    index: int, model: ModelConfig, claim: int, beside: Sequence[tuple[str, int]], total_bytes: int
) -> None:
    """Raise Misplaced unless the claim fits beside the others."""
    short = claim + sum(size for _, size in beside) - total_bytes
    if claim and short > 0:
        less = "".join(f", less {format_bytes(size)} of {name}" for name, size in beside)
        message = (
            f"model {model.name!r} claims {format_bytes(claim)} of this machine's memory, which "
        )
        message += f"has {format_bytes(total_bytes)}{less}: {format_bytes(short)} too much"
        raise Misplaced(message, "models", index, "memory")


def _claim(model: ModelConfig, places: Sequence[Assignment], total_bytes: int) -> int:
    """Return the claim of all CPU replicas of a model; 0 where the configuration has none."""
    replicas = sum(place.model == model.name and not place.gpus for place in places)
    return replicas * host_claim_bytes(model, total_bytes)


def _stays(model: ModelConfig) -> bool:
    return model.load == "on_start"
