"""What the supervisor and the process that speaks to Ray (`servekit.ray.process`) tell each other.

    supervisor → cluster   Join · Look · Berth · Start · Signal · Strays · Vacate · Keep
    cluster → supervisor   answers, by `id`: Joined · Looked · Berthed · Started · Held · Vacated
                           · Sorry
                           Waits · Lines · Measured · Exited · Nodes

A berth is a worker's place in the cluster: a placement group with one bundle, and in it a detached
actor that runs the worker's process. It outlives that process, so that a worker that crashed comes
back where it was. That of a gateway is such an actor, too, on a given node, and claims nothing.
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Message, Value
from servekit.protocol.messages import GpuStatus, Stop


class Node(Value, frozen=True):
    """A node of the cluster as it found itself. `problem` is why it could not look."""

    node: str  # Ray's id
    host: str  # its address
    cpus: float = 0.0  # in all
    gpus: float = 0.0
    python: str = ""
    ray: str = ""
    servekit: str = ""
    lacks: dict[str, str] = {}  # by model: what is missing there, a sentence
    problem: str = ""


class Want(Value, frozen=True):
    """What nodes are asked about one model: those that come later, too, before a worker does."""

    model: str
    engine: str
    path: str  # a folder or file to be there; "" for what is fetched


class RemoteGpu(Value, frozen=True):
    """A GPU of another machine."""

    index: int  # NVML's, there
    uuid: str
    name: str
    total_bytes: int


class Running(Value, frozen=True):
    """A process in a berth."""

    pid: int
    address: str  # where it listens
    fingerprint: str  # of what it was started to be


# ---------------------------------------------------------------- supervisor → cluster


class Join(Message, frozen=True):
    """Connect to the cluster and have all of its nodes look at themselves.

    Sorry where another instance holds that namespace, and lives.
    """

    id: int
    address: str
    namespace: str
    grace_s: float
    within_s: float  # for all of it
    wants: tuple[Want, ...]
    run_dir: str  # who we are, for others who want this namespace
    since: float  # Unix time, s
    turn: int = 0  # what Joined has said before; 0: it is the first time
    watch: bool = False  # tell of nodes that come and go, with Nodes


class Look(Message, frozen=True):
    """Have all nodes that there are now, or a certain one, look at themselves.

    Looked is the answer; Sorry where that one is there no more.
    """

    id: int
    within_s: float
    wants: tuple[Want, ...]
    node: str = ""  # Ray's id; "": all


class Berth(Message, frozen=True):
    """Give a worker its place, the one that it has if it is as wanted."""

    id: int
    name: str
    model: str
    gpus: int
    cpus: float
    strategy: Literal["PACK", "SPREAD"]
    fingerprint: str  # a process that runs there and has another one is ended
    node: str = ""  # it is to be there, and to claim nothing; "": where there is room
    want: Want | None = None  # what a node is asked before it is placed there


class Start(Message, frozen=True):
    """Start the process in its berth."""

    id: int
    name: str
    args: tuple[str, ...]
    env: dict[str, str]  # over the node's own
    credentials: bytes
    fingerprint: str
    pin: Literal["uuid", "index"] = "uuid"  # how its GPUs are named in CUDA_VISIBLE_DEVICES
    role: Literal["worker", "gateway"] = "worker"
    listen: tuple[tuple[str, int], ...] = ()  # host and port: sockets that it inherits


class Signal(Message, frozen=True):
    """Send a signal to a worker: to its process, or to all that it has started, too."""

    name: str
    number: int
    group: bool = False


class Strays(Message, frozen=True):
    """Does the worker hold memory on GPUs that are not its own? Held is the answer."""

    id: int
    name: str


class Vacate(Message, frozen=True):
    """End what runs in a berth and give it back; Vacated when that is done."""

    id: int
    name: str


class Keep(Message, frozen=True):
    """Vacate all berths but these: nobody will ask for the others."""

    names: tuple[str, ...]


# ---------------------------------------------------------------- cluster → supervisor


class Joined(Message, frozen=True):
    id: int
    nodes: tuple[Node, ...]
    turn: int  # by which the namespace is ours
    own: str = ""  # Ray's id of the node that we are on


class Looked(Message, frozen=True):
    id: int
    nodes: tuple[Node, ...]


class Nodes(Message, frozen=True):
    """All that are there, whenever that has changed; new ones have looked at themselves."""

    nodes: tuple[Node, ...]


class Waits(Message, frozen=True):
    """A berth is not there yet, because of that; "" when it does not wait any more."""

    name: str
    what: str


class Berthed(Message, frozen=True):
    id: int
    host: str
    gpus: tuple[RemoteGpu, ...]
    running: Running | None = None  # a worker to be adopted


class Started(Message, frozen=True):
    id: int
    pid: int
    address: str


class Held(Message, frozen=True):
    id: int
    stray: str  # a sentence, "" if it holds nothing but on its own


class Vacated(Message, frozen=True):
    id: int


class Sorry(Message, frozen=True):
    """What was asked for cannot be. `pid` is of a worker that has ended at once."""

    id: int
    message: str
    pid: int = 0


class Lines(Message, frozen=True):
    """What a worker has written."""

    name: str
    lines: tuple[str, ...]


class Measured(Message, frozen=True):
    """What a process takes there, and what NVML says where a worker is; told every few seconds.

    A node without NVML has no GPUs; where a gateway is they are not read.
    """

    name: str
    gpus: tuple[GpuStatus, ...]  # all of the node
    pid: int  # of the process; 0: none runs
    held: dict[str, int]  # bytes that it and what it has started hold, by UUID
    rss_bytes: int = 0  # that it has resident


class Exited(Message, frozen=True):
    """A worker's process has ended. Without code and signal: its node or its actor is gone."""

    name: str
    pid: int
    code: int | None
    signal: int | None
    cause: str = ""
    out_of_memory: bool = False  # the kernel killed something for memory in its lifetime


ToCluster = Stop | Join | Look | Berth | Start | Signal | Strays | Vacate | Keep
Answer = Joined | Looked | Berthed | Started | Held | Vacated | Sorry
FromCluster = Answer | Waits | Lines | Measured | Exited | Nodes
