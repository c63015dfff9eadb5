"""Adapters on the wire: what they are, and how they come and go while a worker serves.

    supervisor → worker    LoadAdapter · UnloadAdapter · Remember
    worker → supervisor    AdapterLoaded · AdapterUnloaded · AdapterRefused
    gateway → supervisor   Unused · Told
    operator → supervisor  AddAdapter · RemoveAdapter · GetAdapters
    supervisor → operator  Adapters, or Accepted, or Refused

Those that a worker begins with are in its WorkerSpec; what became of them in its ModelInfo.
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Message, Value

#: How an adapter shares batches. mixed: with all others and the base, request by request. grouped:
#: a step runs its requests only, through its own layers. merged: the same, with a copy of the
#: weights that it changes.
AdapterMode = Literal["mixed", "grouped", "merged"]
AdapterState = Literal["loading", "serving", "unloading", "failed"]


class AdapterSpec(Value, frozen=True):
    """An adapter to load onto a model. `name` is what requests call it."""

    name: str
    path: str  # a folder with adapter_config.json, or a hub id
    revision: str | None = None
    any_base: bool = False  # load it although it names another base


class AdapterInfo(Value, frozen=True):
    """A loaded and verified adapter, as its worker found it."""

    name: str
    kind: str  # PEFT's name of the tuner: "LORA", "BOFT", …; "DORA" for LoRA with magnitudes
    mode: AdapterMode
    why: str  # one sentence: why it is run that way
    rank: int = 0  # 0 where the tuner has none
    parameters: int = 0
    bytes: int = 0  # that it takes on the device
    figures: dict[str, float] = {}  # what its verification measured, by name
    virtual_tokens: int = 0  # that it puts before each prompt, and that take room in the context


class AdapterStatus(Value, frozen=True):
    """An adapter, as seen by the supervisor."""

    name: str
    path: str
    state: AdapterState
    reason: str = ""  # why it has failed
    info: AdapterInfo | None = None
    from_file: bool = True  # or added at run time
    since: float = 0.0  # Unix time, s


# ---------------------------------------------------------------- supervisor ↔ worker


class LoadAdapter(Message, frozen=True):
    seq: int
    adapter: AdapterSpec


class UnloadAdapter(Message, frozen=True):
    """Take no new request for it; forget it when those under way are done."""

    seq: int
    name: str


class SetAdapters(Message, frozen=True):
    """What operators have added to your model, for a supervisor that may come after this one."""

    added: tuple[AdapterSpec, ...]


class AdapterLoaded(Message, frozen=True):
    """It is verified, and serves from now on."""

    seq: int
    info: AdapterInfo


class AdapterUnloaded(Message, frozen=True):
    """Its memory is free."""

    seq: int
    name: str


class AdapterRefused(Message, frozen=True):
    """It is not loaded, and nothing of it is left."""

    seq: int
    message: str
    invalid: bool  # the adapter is wrong for this model, not the moment


# ---------------------------------------------------------------- gateway → supervisor


class AdapterUnused(Message, frozen=True):
    """No request of this gateway needs an adapter any more that does not serve, by its Topology."""

    name: str


class TopologyApplied(Message, frozen=True):
    """The Topology of that serial number holds at this gateway: an answer may rely on it."""

    serial: int


# ---------------------------------------------------------------- operator ↔ supervisor


class AddAdapter(Message, frozen=True):
    """Load it on all replicas, or on none. Accepted, or Refused, when that is decided."""

    model: str  # its name or alias; "" where one model is served
    adapter: AdapterSpec
    in_place: bool = False  # instead of what has its name now


class RemoveAdapter(Message, frozen=True):
    """Accepted, or Refused, when it is gone from all replicas."""

    name: str


class GetAdapters(Message, frozen=True):
    """Answered by Adapters, or Refused."""

    model: str = ""  # "": all


class Adapters(Message, frozen=True):
    """Answer to GetAdapters."""

    adapters: dict[str, tuple[AdapterStatus, ...]]  # by model
