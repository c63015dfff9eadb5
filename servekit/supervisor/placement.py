"""Which worker runs on which GPU. A pure function of the file and the machine.

    device   GPUs found   the model runs on
    cpu      any          the CPU
    cuda     some         GPUs, one per replica
    cuda     none         ConfigError
    auto     some         GPUs, one per replica (engines that have no use for one: the CPU)
    auto     none         the CPU (unless `gpus` names some: ConfigError)

First every model gets what it must have: its explicit number of replicas, or one. Then what is
left is dealt to the models with `replicas: auto`, one at a time, always to the one with the
fewest. Both steps look for augmenting paths (Kuhn's algorithm for bipartite matching), so a
placement is found whenever there is one, whatever GPUs the models insist on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servekit.config.engines import KINDS
from servekit.config.schema import ModelConfig
from servekit.errors import ConfigError
from servekit.supervisor.gpus import Gpu, Slot, match


class Misplaced(ConfigError):
    """The models do not fit this machine. `loc` leads to the value to blame in the file."""

    def __init__(self, message: str, *loc: str | int) -> None:
        super().__init__(message)
        self.loc = loc


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker's place: its GPUs, none for the CPU. `threads`: its share of the cores there."""

    model: str
    index: int
    gpus: Slot
    threads: int | None

    @property
    def name(self) -> str:
        return f"{self.model}/{self.index}"

    @property
    def device(self) -> str:
        return device(self.gpus)


def place(
    models: Sequence[ModelConfig],
    gpus: Sequence[Gpu],
    cpus: int,
    held: Mapping[str, Sequence[Slot]] | None = None,
) -> tuple[Assignment, ...]:
    """Give every worker a place, in the file's order. Raises Misplaced if they do not fit.

    `held` are the GPUs that models have already: they keep them, unless another could not be
    placed otherwise.
    """
    wanted = {m.name: _allowed(i, m, gpus) for i, m in enumerate(models) if _on_gpu(i, m, gpus)}
    counts = {m.name: _least(m) for m in models}
    matching = _Matching(
        wanted,
        {name: [gpu for slot in slots for gpu in slot] for name, slots in (held or {}).items()},
    )
    matching.keep({name: counts[name] for name in wanted})
    _satisfy(matching, models, {name: counts[name] for name in wanted}, gpus)
    _share(matching, [m.name for m in models if m.name in wanted and m.replicas == "auto"])
    on_cpu = sum(counts[m.name] for m in models if m.name not in wanted)
    threads = _threads(cpus, on_cpu)
    placed: list[Assignment] = []
    for model in models:
        if model.name in wanted:
            own = sorted(matching.gpus_of(model.name), key=lambda gpu: gpu.index)
            placed += [Assignment(model.name, i, (gpu,), None) for i, gpu in enumerate(own)]
        else:
            placed += [Assignment(model.name, i, (), threads) for i in range(counts[model.name])]
    return tuple(placed)


def device(gpus: Sequence[Gpu]) -> str:
    """ "cpu", "GPU 0 (NVIDIA H200)", "GPUs 0, 1 (NVIDIA H200)"."""
    if len(gpus) < 2:
        return str(gpus[0]) if gpus else "cpu"
    kinds = dict.fromkeys(gpu.name for gpu in gpus)
    return f"GPUs {', '.join(str(gpu.index) for gpu in gpus)} ({', '.join(kinds)})"


def _on_gpu(index: int, model: ModelConfig, gpus: Sequence[Gpu]) -> bool:
    if model.device == "cpu":
        if model.gpus is not None:
            message = f"model {model.name!r} names GPUs but asks for device: cpu"
            raise Misplaced(message, "models", index, "gpus")
        return False
    if model.device == "cuda" and not gpus:
        raise Misplaced(
            f"model {model.name!r} asks for device: cuda, and no NVIDIA GPU was found here; "
            "write device: auto to fall back to the CPU",
            *("models", index, "device"),
        )
    return (
        model.device == "cuda"
        or model.gpus is not None
        or (bool(gpus) and KINDS[model.engine].gpu != "never")
    )


def _allowed(index: int, model: ModelConfig, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    if model.gpus is None:
        return tuple(gpus)
    allowed: list[Gpu] = []
    for number, entry in enumerate(model.gpus):
        gpu = match(gpus, entry)
        if gpu is None:
            there = ", ".join(str(g) for g in gpus) or "no GPU at all"
            message = f"model {model.name!r} asks for GPU {entry!r}; there is {there}"
            raise Misplaced(message, "models", index, "gpus", number)
        if gpu not in allowed:
            allowed.append(gpu)
    return tuple(allowed)


def _least(model: ModelConfig) -> int:
    return 1 if model.replicas == "auto" else int(model.replicas)


def _threads(cpus: int, workers: int) -> int:
    # One core is left to the gateway and the rest: a CPU worker that fills every core makes
    # its own tokens wait for the process that sends them.
    return max(1, (cpus - 1) // max(1, workers))


class _Matching:
    """Who holds which GPU; grows one GPU at a time without ever taking a model's count down."""

    def __init__(
        self, allowed: Mapping[str, Sequence[Gpu]], held: Mapping[str, Sequence[Gpu]]
    ) -> None:
        self.allowed = allowed
        self._held = held
        self._holder: dict[Gpu, str] = {}

    def gpus_of(self, name: str) -> list[Gpu]:
        return [gpu for gpu, holder in self._holder.items() if holder == name]

    def keep(self, counts: Mapping[str, int]) -> None:
        """Begin with what models hold now, up to what each must have."""
        for name, count in counts.items():
            own = [gpu for gpu in self._held.get(name, ()) if gpu in self.allowed[name]]
            for gpu in own[:count]:
                self._holder.setdefault(gpu, name)

    def grow(self, name: str) -> bool:
        """Give `name` one more GPU, moving others if need be; False if that cannot be."""
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


def _satisfy(
    matching: _Matching,
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


def _share(matching: _Matching, names: list[str]) -> None:
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
            "each replica takes a GPU of its own"
        )
    needs = ", ".join(f"{model} {count}" for model, count in counts.items())
    total = sum(counts.values())
    if total > len(gpus):
        return (
            f"the models need {total} GPUs ({needs}) and there are {len(gpus)}: "
            f"{total - len(gpus)} too few; each replica takes a GPU of its own"
        )
    return (
        f"model {name!r} needs {counts[name]} of the GPUs that its `gpus` names, and the other "
        f"models' `gpus` leave it fewer (replicas: {needs}; {len(gpus)} GPUs in all)"
    )
