"""Messages between the supervisor and the process that talks to Ray (`servekit.ray.process`).

    supervisor → cluster   Join · Look · Berth · Start · Signal · Strays · Vacate · Keep
    cluster → supervisor   answers, by `id`: Joined · Looked · Berthed · Started · Held · Vacated
                           · Sorry
                           Waits · Lines · Measured · Exited · Nodes

A berth is a worker's place in the cluster: a placement group with one bundle, and in it a detached
actor that runs the worker's process. It outlives the process, so that a crashed worker restarts in
the same place. A gateway's berth is such an actor on a given node, without claimed resources.
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Message, Value
from servekit.protocol.messages import GpuStatus, Stop


class Node(Value, frozen=True):
    """A node of the cluster and its own findings. `problem` is why it could not examine itself."""

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
    """The requirements of one model, checked on each node, also on nodes that join later."""

    model: str
    engine: str
    path: str  # a folder or file that must exist; "" if it is fetched


class RemoteGpu(Value, frozen=True):
    """A GPU of another machine."""

    index: int  # NVML's, there
    uuid: str
    name: str
    total_bytes: int


class Running(Value, frozen=True):
    """A process in a berth."""

    pid: int
    address: str  # its listening address
    fingerprint: str  # of its start options


# ---------------------------------------------------------------- supervisor → cluster


class Join(Message, frozen=True):
    """Connect to the cluster and have all of its nodes examine themselves.

    Answered by Sorry if another live instance holds the namespace.
    """

    id: int
    address: str
    namespace: str
    grace_s: float
    within_s: float  # total time limit
    wants: tuple[Want, ...]
    run_dir: str  # identifies this instance to others that want the namespace
    since: float  # Unix time, s
    turn: int = 0  # from the previous Joined; 0: the first time
    watch: bool = False  # report joining and leaving nodes with Nodes


class Look(Message, frozen=True):
    """Have all present nodes, or one of them, examine themselves.

    Answered by Looked, or Sorry if that node is gone.
    """

    id: int
    within_s: float
    wants: tuple[Want, ...]
    node: str = ""  # Ray's id; "": all


class Berth(Message, frozen=True):
    """Give a worker its place; a suitable existing place is reused."""

    id: int
    name: str
    model: str
    gpus: int
    cpus: float
    strategy: Literal["PACK", "SPREAD"]
    fingerprint: str  # a running process with another fingerprint is ended
    node: str = ""  # place it there without a claim; "": where there is room
    want: Want | None = None  # checked on the node before the placement


class Start(Message, frozen=True):
    """Start the process in its berth."""

    id: int
    name: str
    args: tuple[str, ...]
    env: dict[str, str]  # overrides the node's environment
    credentials: bytes
    fingerprint: str
    pin: Literal["uuid", "index"] = "uuid"  # how its GPUs are named in CUDA_VISIBLE_DEVICES
    role: Literal["worker", "gateway"] = "worker"
    listen: tuple[tuple[str, int], ...] = ()  # host and port of sockets to inherit


class Signal(Message, frozen=True):
    """Send a signal to a worker's process, or to its whole process group."""

    name: str
    number: int
    group: bool = False


class Strays(Message, frozen=True):
    """Ask whether a worker holds memory on GPUs that are not its own. Answered by Held."""

    id: int
    name: str


class Vacate(Message, frozen=True):
    """End the process in a berth and release the berth. Answered by Vacated."""

    id: int
    name: str


class Keep(Message, frozen=True):
    """Release all berths but these; the others are no longer needed."""

    names: tuple[str, ...]


# ---------------------------------------------------------------- cluster → supervisor


class Joined(Message, frozen=True):
    id: int
    nodes: tuple[Node, ...]
    turn: int  # by which this instance holds the namespace
    own: str = ""  # Ray's id of the supervisor's node


class Looked(Message, frozen=True):
    id: int
    nodes: tuple[Node, ...]


class Nodes(Message, frozen=True):
    """The present nodes, sent on every change; new nodes have examined themselves."""

    nodes: tuple[Node, ...]


class Waits(Message, frozen=True):
    """The reason why a berth is not available yet; "" when it no longer waits."""

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
    stray: str  # a sentence; "" if it holds memory on its own GPUs only


class Vacated(Message, frozen=True):
    id: int


class Sorry(Message, frozen=True):
    """The request failed. `pid` is that of a worker that ended at once."""

    id: int
    message: str
    pid: int = 0


class Lines(Message, frozen=True):
    """Lines of a worker's output."""

    name: str
    lines: tuple[str, ...]


class Measured(Message, frozen=True):
    """Resource usage of a process, and NVML's figures on a worker's node, every few seconds.

    A node without NVML has no GPUs; they are not read for a gateway.
    """

    name: str
    gpus: tuple[GpuStatus, ...]  # all of the node
    pid: int  # of the process; 0: none runs
    held: dict[str, int]  # bytes that it and its descendants hold, by UUID
    rss_bytes: int = 0  # resident memory


class Exited(Message, frozen=True):
    """A worker's process has ended. Without code and signal, its node or actor is gone."""

    name: str
    pid: int
    code: int | None
    signal: int | None
    cause: str = ""
    out_of_memory: bool = False  # the kernel's OOM killer was active in its lifetime


ToCluster = Stop | Join | Look | Berth | Start | Signal | Strays | Vacate | Keep
Answer = Joined | Looked | Berthed | Started | Held | Vacated | Sorry
FromCluster = Answer | Waits | Lines | Measured | Exited | Nodes
