"""Messages about adapters: descriptions, and loading and unloading while a worker serves.

    supervisor → worker    LoadAdapter · UnloadAdapter · SetAdapters
    worker → supervisor    AdapterLoaded · AdapterUnloaded · AdapterRefused
    gateway → supervisor   AdapterUnused · TopologyApplied
    operator → supervisor  AddAdapter · RemoveAdapter · GetAdapters
    supervisor → operator  Adapters, or Accepted, or Refused

The adapters that a worker starts with are in its WorkerSpec; the results are in its ModelInfo.
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Message, Value

#: How an adapter shares batches. mixed: with the base and all other adapters, per request. grouped:
#: a step runs only requests of this adapter, through its own layers. merged: as grouped, with a
#: modified copy of the weights that the adapter changes.
AdapterMode = Literal["mixed", "grouped", "merged"]
AdapterState = Literal["loading", "serving", "unloading", "failed"]


class AdapterSpec(Value, frozen=True):
    """An adapter to load onto a model. Requests use it by `name`."""

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
    """Refuse new requests for the adapter; unload it when its running requests are done."""

    seq: int
    name: str


class SetAdapters(Message, frozen=True):
    """The adapters that operators have added to the model, kept for a successor supervisor."""

    added: tuple[AdapterSpec, ...]


class AdapterLoaded(Message, frozen=True):
    """The adapter is verified and serves from now on."""

    seq: int
    info: AdapterInfo


class AdapterUnloaded(Message, frozen=True):
    """The memory of the adapter is free."""

    seq: int
    name: str


class AdapterRefused(Message, frozen=True):
    """The adapter is not loaded, and nothing of it remains in memory."""

    seq: int
    message: str
    invalid: bool  # the adapter does not fit this model; a retry would fail, too


# ---------------------------------------------------------------- gateway → supervisor


class AdapterUnused(Message, frozen=True):
    """A gateway has no more requests for an adapter that its Topology no longer serves."""

    name: str


class TopologyApplied(Message, frozen=True):
    """The gateway has applied the Topology with that serial number: an answer may rely on it."""

    serial: int


# ---------------------------------------------------------------- operator ↔ supervisor


class AddAdapter(Message, frozen=True):
    """Load an adapter on all replicas or on none. Answered by Accepted or Refused when decided."""

    model: str  # its name or alias; "" where one model is served
    adapter: AdapterSpec
    in_place: bool = False  # replace the adapter that has this name now


class RemoveAdapter(Message, frozen=True):
    """Unload an adapter. Answered by Accepted when all replicas have unloaded it, or Refused."""

    name: str


class GetAdapters(Message, frozen=True):
    """List the adapters. Answered by Adapters, or Refused."""

    model: str = ""  # "": all


class Adapters(Message, frozen=True):
    """The answer to GetAdapters."""

    adapters: dict[str, tuple[AdapterStatus, ...]]  # by model
