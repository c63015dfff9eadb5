"""Whole GPUs for workers of one GPU each: bipartite matching by augmenting paths (Kuhn)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.memory_requests import Misplaced, least
from servekit.system.gpu.gpus import Gpu, Slot


class Matching:
    """An assignment of GPUs to models that grows without ever reducing a model's count."""

    def __init__(
        self, allowed: Mapping[str, Sequence[Gpu]], held: Mapping[str, Sequence[Gpu]]
    ) -> None:
        self.allowed = allowed
        self._held = held
        self._holder: dict[Gpu, str] = {}

    def gpus_of(self, name: str) -> list[Gpu]:
        return [gpu for gpu, holder in self._holder.items() if holder == name]

    def keep_current(self, counts: Mapping[str, int]) -> None:
        """Start from the GPUs that models hold now, up to each model's count."""
        for name, count in counts.items():
            own = [gpu for gpu in self._held.get(name, ()) if gpu in self.allowed[name]]
            for gpu in own[:count]:
                self._holder.setdefault(gpu, name)

    def grow(self, name: str) -> bool:
        """Give `name` one more GPU, moving other models if necessary; return whether it could."""
        return self._augment(name, set())

    def _augment(self, name: str, seen: set[Gpu]) -> bool:
        own = self._held.get(name, ())
        for gpu in sorted(self.allowed[name], key=lambda g: (g in self._holder, g not in own)):
            holder = self._holder.get(gpu)
            if gpu in seen or holder == name:
                continue
            seen.add(gpu)
            if holder is None or self._augment(holder, seen):
                self._holder[gpu] = name
                return True
        return False


def match_whole(
    models: Sequence[ModelConfig],
    wanted: Mapping[str, Sequence[Gpu]],
    gpus: Sequence[Gpu],
    held: Mapping[str, Sequence[Slot]],
) -> dict[str, list[Slot]]:
    """Return a whole GPU for each replica. Raises Misplaced."""
    counts = {m.name: least(m) for m in models if m.name in wanted}
    single = {name: [slot[0] for slot in own if len(slot) == 1] for name, own in held.items()}
    matching = Matching(wanted, single)
    matching.keep_current(counts)
    _satisfy(matching, models, counts, gpus)
    _share(matching, [m.name for m in models if m.name in wanted and m.replicas == "auto"])
    found = {name: sorted(matching.gpus_of(name), key=lambda gpu: gpu.index) for name in wanted}
    return {name: [(gpu,) for gpu in own] for name, own in found.items()}


def _satisfy(
    matching: Matching,
    models: Sequence[ModelConfig],
    counts: Mapping[str, int],
    gpus: Sequence[Gpu],
) -> None:
    for index, model in enumerate(models):
        lacking = counts.get(model.name, 0) - len(matching.gpus_of(model.name))
        for _ in range(lacking):
            if not matching.grow(model.name):
                message = _shortage(model.name, counts, matching.allowed[model.name], gpus)
                key = "gpus" if model.replicas == "auto" and model.gpus else "replicas"
                raise Misplaced(message, "models", index, key)


def _share(matching: Matching, names: list[str]) -> None:
    growing = list(names)
    while growing:
        name = min(growing, key=lambda n: len(matching.gpus_of(n)))
        if not matching.grow(name):
            growing.remove(name)


def _shortage(
    name: str, counts: Mapping[str, int], allowed: Sequence[Gpu], gpus: Sequence[Gpu]
) -> str:
    if counts[name] > len(allowed) and len(allowed) < len(gpus):
        return (
            f"model {name!r} asks for {counts[name]} replicas and its `gpus` names {len(allowed)}: "
            "each replica takes a GPU of its own, or a share of one by `memory`"
        )
    needs = ", ".join(f"{model} {count}" for model, count in counts.items())
    total = sum(counts.values())
    if total > len(gpus):
        return (
            f"the models need {total} GPUs ({needs}) and there are {len(gpus)}: "
            f"{total - len(gpus)} too few; each replica takes a GPU of its own, or a share of one "
            "by `memory`"
        )
    return (
        f"model {name!r} needs {counts[name]} of the GPUs that its `gpus` names, and the other "
        f"models' `gpus` leave it fewer (replicas: {needs}; {len(gpus)} GPUs in all)"
    )
