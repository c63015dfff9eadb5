"""The changes of a reload: a pure function of the running models and the new configuration.

a model's section                          its replicas
is the same                                go on unchanged
differs in keys workers do not see         go on, with the new values
differs in its adapters                    go on, and load or unload those
differs in replica count or GPUs           the difference is added or drained
differs in the range of replicas           go on, within the new range
differs in anything that the worker loads  are replaced
is gone                                    are drained
is new                                     are started
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from servekit.config.schema import Config, ModelConfig
from servekit.config.sections.scale import ReplicaRange
from servekit.supervisor.scheduling.memory_requests import Assignment, device
from servekit.system.gpu.gpus import Slot

Kind = Literal["unchanged", "updated", "adapted", "scaled", "replaced", "removed", "added"]
#: The GPUs of each replica of a model.
Slots = tuple[Slot, ...]

#: Keys of a model that no worker ever sees.
_NOT_THE_WORKERS = frozenset({"aliases", "timeout_s", "max_queue", "quarantine_s"}) | {
    "presets",
    "stall_timeout_s",
    "load_timeout_s",
    "stray_memory",
    "standby",
    "load",
    "idle_unload_s",
    "idle_sleep_s",
    "routing",
    "scale",
}
#: Keys that workers apply while they serve.
_IN_PLACE = frozenset({"adapters"})
#: Keys that say where workers run, not what they load.
_PLACEMENT = frozenset({"replicas", "gpus"})
#: Keys of `server` that a running instance can take over.
LIVE_SERVER_KEYS = frozenset(
    {"drain_timeout_s", "cors", "hosts", "limits", "runtime_adapters", "open_metrics"}
    | {"default_model", "unknown_parameters", "prefix_cache"}
    | {"max_queue_bytes", "write_timeout_s", "trusted_proxies", "fetch_images", "store_responses"}
    | {"browser_link", "batches", "mcp"}
)


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one model, and its replica counts before and after."""

    name: str
    kind: Kind
    before: int
    after: int

    def __str__(self) -> str:
        match self.kind:
            case "replaced":
                return f"{_replicas(self.before)} of {self.name} replaced" + (
                    f" by {self.after}" if self.after != self.before else ""
                )
            case "scaled" if self.before != self.after:
                return f"{self.name} scaled from {self.before} to {self.after}"
            case "scaled":
                return f"{self.name} moved"
            case "adapted":
                return f"adapters of {self.name} changed"
            case "added":
                return f"{self.name} added with {_replicas(self.after)}"
        return f"{self.name} {self.kind}"


def needs_restart(old: Config, new: Config) -> str:
    """Return a sentence on the changed keys that need a restart; "" if there are none."""
    keys = [f"server.{key}" for key in sorted(_differ(old.server, new.server) - LIVE_SERVER_KEYS)]
    keys += [f"gpus.{key}" for key in sorted(_differ(old.gpus, new.gpus))]
    keys += ["logging.format"] if old.logging.format != new.logging.format else []
    keys += [
        key for key in ("run_dir", "launcher", "ray") if getattr(old, key) != getattr(new, key)
    ]
    if not keys:
        return ""
    return f"{', '.join(keys)}: a change of it needs a restart; nothing was changed"


def same_worker(old: ModelConfig, new: ModelConfig) -> bool:
    """Return whether a worker of `old` may go on as one of `new`."""
    alike = (old.idle_sleep_s is None) == (new.idle_sleep_s is None)  # sleep is enabled at start
    return alike and _differ(old, new) <= _NOT_THE_WORKERS | _PLACEMENT | _IN_PLACE


def slots(name: str, places: Sequence[Assignment]) -> Slots:
    """Return the GPUs of each replica of a model."""
    return tuple(place.gpus for place in places if place.model == name)


def diff(
    running: Mapping[str, tuple[ModelConfig, Slots]],
    models: Sequence[ModelConfig],
    places: Sequence[Assignment],
) -> tuple[Change, ...]:
    """Return the changes in the order of the new configuration, removed models last."""
    changes: list[Change] = []
    for model in models:
        after = slots(model.name, places)
        if model.name not in running:
            changes.append(Change(model.name, "added", 0, len(after)))
            continue
        old, before = running[model.name]
        after = after or before  # the profile leaves it out, until it is unloaded
        changes.append(
            Change(model.name, _kind(old, model, before, after), len(before), len(after))
        )
    names = {model.name for model in models}
    gone = [(name, held) for name, (_, held) in running.items() if name not in names]
    return (*changes, *(Change(name, "removed", len(held), 0) for name, held in gone))


def changed_sections(old: Config, new: Config, *, access: bool) -> list[str]:
    """Return what has changed beside the models; `access`: the rules that gateways follow have."""
    first = ["access"] if access else ["server"] if old.server != new.server else []
    return first + (["profiles"] if old.profiles != new.profiles else [])


def describe_changes(
    changes: Sequence[Change], lacking: Collection[str] = (), sections: Sequence[str] = ()
) -> str:
    """Return the changes in words: "2 replicas of a replaced, b removed, c unchanged".

    `lacking` are the models whose missing adapters are loaded again.
    """
    again = [c.name for c in changes if c.kind == "unchanged" and c.name in lacking]
    if not sections and not again and all(change.kind == "unchanged" for change in changes):
        return "nothing to change"
    told = [
        f"adapters of {change.name} loaded again" if change.name in again else str(change)
        for change in changes
    ]
    return ", ".join([*(f"{section} changed" for section in sections), *told])


def _kind(old: ModelConfig, new: ModelConfig, before: Slots, after: Slots) -> Kind:
    if not same_worker(old, new):
        return "replaced"
    if sorted(map(device, before)) != sorted(map(device, after)):
        return "scaled"
    if _differ(old, new) & _IN_PLACE:
        return "adapted"
    has_range = any(isinstance(one.replicas, ReplicaRange) for one in (old, new))
    other_range = old.replicas != new.replicas and has_range
    return "updated" if other_range or _differ(old, new) & _NOT_THE_WORKERS else "unchanged"


def _differ(old: object, new: object) -> set[str]:
    return {key for key, value in vars(old).items() if value != getattr(new, key)}


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
