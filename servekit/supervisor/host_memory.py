"""Whether the models on the CPU fit this machine's memory, as far as the file says what they take.

Those that are loaded on start have to fit side by side, each that comes and goes beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from servekit.config import memory
from servekit.config.schema import ModelConfig
from servekit.supervisor.claims import Misplaced, gib
from servekit.supervisor.placement import Assignment


def check(models: Sequence[ModelConfig], places: Sequence[Assignment], total_bytes: int) -> None:
    """Raise Misplaced, with the arithmetic, where they do not. `total_bytes` 0: it is not known."""
    claims = {m.name: _claim(m, places, total_bytes) for m in models if m.memory is not None}
    staying = [(m.name, claims[m.name]) for m in models if m.name in claims and _stays(m)]
    for index, model in enumerate(models if total_bytes else ()):
        claim = claims.get(model.name, 0)
        others = [(name, size) for name, size in staying if name != model.name]
        short = claim + sum(size for _, size in others) - total_bytes
        if claim and short > 0:
            less = "".join(f", less {gib(size)} of {name}" for name, size in others if size)
            message = f"model {model.name!r} claims {gib(claim)} of this machine's memory, which "
            message += f"has {gib(total_bytes)}{less}: {gib(short)} too much"
            raise Misplaced(message, "models", index, "memory")


def _claim(model: ModelConfig, places: Sequence[Assignment], total_bytes: int) -> int:
    replicas = sum(place.model == model.name and not place.gpus for place in places)
    return replicas * memory.of(model.memory or "", total_bytes) if replicas else 0


def _stays(model: ModelConfig) -> bool:
    return model.load == "on_start"
