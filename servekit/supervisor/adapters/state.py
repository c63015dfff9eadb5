"""The state machine of a model's adapters: pure; the clock is an argument.

state      event                                         next
           an operator adds it, or the file names it     loading
           the same, and the model is unloaded           loading, until the model is loaded
loading    all workers that serve have it                serving
           a worker refuses it, or dies while loading    failed, or gone if an operator added it;
                                                         the others unload it
serving    an operator or the file removes it            unloading
           a new worker refuses it, others have it       serving; that worker does not serve
           a new worker refuses it, none has it          failed
unloading  no worker has it any more                     gone
failed     it is added again, or the file is read again  loading

Expected adapters are those that the file names or an operator has added before: workers start with
them. The model itself is served, whatever happens to its adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterSpec,
    AdapterState,
    AdapterStatus,
)

#: The Retry-After of a refusal for lack of a ready worker, in seconds.
RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of an order by a worker."""

    message: str
    invalid: bool = False  # the adapter is wrong for the model; else the failure may pass
    died: bool = False  # the worker died
    left: bool = False  # the worker was told to end: ignore its answer
    retry_after_s: float = 0.0


Outcome = AdapterInfo | Refusal


@dataclass(frozen=True, slots=True)
class Later:
    """The outcome for a model that is not loaded: the adapter will be loaded with it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of one adapter.

    `expected`: workers start with it; else an operator waits for the decision.
    """

    spec: AdapterSpec
    from_file: bool
    expected: bool
    state: AdapterState
    since: float  # Unix time, s
    reason: str = ""
    info: AdapterInfo | None = None


def no_ready_worker(model: str) -> Refusal:
    """Return the refusal for a model without a ready worker."""
    message = f"no worker of {model!r} is ready; try again when one is"
    return Refusal(message, retry_after_s=RETRY_AFTER_S)


def combine_outcomes(model: str, outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the workers' outcomes, all or none; report an invalid adapter first."""
    asked = [one for one in outcomes if not (isinstance(one, Refusal) and one.left)]
    refusals = [one for one in asked if isinstance(one, Refusal)]
    if refusals:
        return min(refusals, key=lambda one: (not one.invalid, one.died))
    loaded = [one for one in asked if isinstance(one, AdapterInfo)]
    return loaded[0] if loaded else no_ready_worker(model)


class AdapterTable:
    """The adapters of one model by name, in the order in which they were added."""

    def __init__(self, file: Sequence[AdapterSpec] = (), now: float = 0.0) -> None:
        self._entries: dict[str, Entry] = {}
        for spec in file:
            self.expect(spec, now, from_file=True)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    # ---- changes of state

    def expect(self, spec: AdapterSpec, now: float, *, from_file: bool) -> None:
        """Add an adapter that workers are to load, without an outcome yet."""
        self._entries[spec.name] = Entry(spec, from_file, True, "loading", now)

    def add_requested(self, spec: AdapterSpec, now: float, *, from_file: bool) -> None:
        """Add an adapter that serving workers are asked to load; new ones wait for the decision."""
        self._entries[spec.name] = Entry(spec, from_file, False, "loading", now)

    def mark_serving(self, name: str, info: AdapterInfo, now: float) -> None:
        self._set_state(name, "serving", now, info=info, expected=True)

    def mark_failed(self, name: str, reason: str, now: float) -> None:
        self._set_state(name, "failed", now, reason=reason)

    def mark_leaving(self, name: str, now: float) -> None:
        """Mark an adapter that takes no new requests, and is to be unloaded."""
        self._set_state(name, "unloading", now)

    def adopt(self, name: str) -> None:
        """Mark an operator's adapter as one that the file names."""
        self._entries[name] = replace(self._entries[name], from_file=True)

    def restore(self, entry: Entry) -> None:
        self._entries[entry.spec.name] = entry

    def forget_adapter(self, name: str) -> None:
        self._entries.pop(name, None)

    def _set_state(
        self,
        name: str,
        state: AdapterState,
        now: float,
        *,
        info: AdapterInfo | None = None,
        reason: str = "",
        expected: bool | None = None,
    ) -> None:
        old = self._entries[name]
        self._entries[name] = replace(
            old,
            state=state,
            since=now,
            reason=reason,
            info=info or old.info,
            expected=old.expected if expected is None else expected,
        )

    # ---- queries

    def expected(self, *, from_file: bool | None = None) -> tuple[AdapterSpec, ...]:
        """Return the adapters a new worker starts with; only the file's, or only operators'."""
        return tuple(
            entry.spec
            for entry in self
            if entry.expected and entry.state in ("loading", "serving")
            if from_file is None or entry.from_file is from_file
        )

    def surplus_adapters(self, held: Collection[str]) -> list[str]:
        """Return the adapters of `held` that a worker has to unload before it serves."""
        wanted = {spec.name for spec in self.expected()}
        return [name for name in held if name not in wanted]

    def statuses(self, serving: Sequence[Mapping[str, AdapterInfo]]) -> tuple[AdapterStatus, ...]:
        """Return the status of all adapters, given what each serving worker holds."""
        return tuple(_status(entry, serving) for entry in self)


def _status(entry: Entry, serving: Sequence[Mapping[str, AdapterInfo]]) -> AdapterStatus:
    spec, state = entry.spec, entry.state
    if state in ("loading", "serving") and entry.expected and serving:
        # Workers of another version may serve too, and a request may reach any of them.
        state = "serving" if all(spec.name in held for held in serving) else "loading"
    info = entry.info or next((held[spec.name] for held in serving if spec.name in held), None)
    return AdapterStatus(
        spec.name, spec.path, state, entry.reason, info, entry.from_file, entry.since
    )
