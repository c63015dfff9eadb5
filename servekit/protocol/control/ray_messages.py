"""Messages between the supervisor and the process that talks to Ray (`servekit.ray.process`).

    supervisor → cluster   JoinCluster · InspectNodes · PlaceWorker · Start · Signal ·
                           GetStrayMemory · ReleasePlace · KeepPlaces
    cluster → supervisor   answers, by `id`: ClusterJoined · NodesInspected · WorkerPlaced ·
                           Started · StrayMemory · PlaceReleased · RequestFailed
                           PlacementWaits · Lines · Measured · Exited · Nodes

A worker's place in the cluster is a placement group with one bundle, and in it a detached actor
that runs the worker's process. It outlives the process, so that a crashed worker restarts in the
same place. A gateway's place is such an actor on a given node, without claimed resources.
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Message, Value
from servekit.protocol.messages import GpuStatus, Ping, Stop


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


class NodeRequirements(Value, frozen=True):
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
    """A process in a place."""

    pid: int
    address: str  # its listening address
    fingerprint: str  # of its start options


# ---------------------------------------------------------------- supervisor → cluster


class JoinCluster(Message, frozen=True):
    """Connect to the cluster and have all of its nodes examine themselves.

    Answered by RequestFailed if another live instance holds the namespace.
    """

    id: int
    address: str
    namespace: str
    grace_s: float
    within_s: float  # total time limit
    wants: tuple[NodeRequirements, ...]
    run_dir: str  # identifies this instance to others that want the namespace
    since: float  # Unix time, s
    turn: int = 0  # from the previous ClusterJoined; 0: the first time
    watch: bool = False  # report joining and leaving nodes with Nodes


class InspectNodes(Message, frozen=True):
    """Have all present nodes, or one of them, examine themselves.

    Answered by NodesInspected, or RequestFailed if that node is gone.
    """

    id: int
    within_s: float
    wants: tuple[NodeRequirements, ...]
    node: str = ""  # Ray's id; "": all


class PlaceWorker(Message, frozen=True):
    """Give a worker its place; a suitable existing place is reused."""

    id: int
    name: str
    model: str
    gpus: int
    cpus: float
    strategy: Literal["PACK", "SPREAD"]
    fingerprint: str  # a running process with another fingerprint is ended
    node: str = ""  # place it there without a claim; "": where there is room
    want: NodeRequirements | None = None  # checked on the node before the placement


class Start(Message, frozen=True):
    """Start the process in its place."""

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


class GetStrayMemory(Message, frozen=True):
    """Ask whether a worker holds memory on GPUs that are not its own. Answered by StrayMemory."""

    id: int
    name: str


class ReleasePlace(Message, frozen=True):
    """End the process in a place and release the place. Answered by PlaceReleased."""

    id: int
    name: str


class KeepPlaces(Message, frozen=True):
    """Release all places but these; the others are no longer needed."""

    names: tuple[str, ...]


# ---------------------------------------------------------------- cluster → supervisor


class ClusterJoined(Message, frozen=True):
    id: int
    nodes: tuple[Node, ...]
    turn: int  # by which this instance holds the namespace
    own: str = ""  # Ray's id of the supervisor's node


class NodesInspected(Message, frozen=True):
    id: int
    nodes: tuple[Node, ...]


class Nodes(Message, frozen=True):
    """The present nodes, sent on every change; new nodes have examined themselves."""

    nodes: tuple[Node, ...]


class PlacementWaits(Message, frozen=True):
    """The reason why a place is not available yet; "" when it no longer waits."""

    name: str
    what: str


class WorkerPlaced(Message, frozen=True):
    id: int
    host: str
    gpus: tuple[RemoteGpu, ...]
    running: Running | None = None  # a worker to be adopted


class Started(Message, frozen=True):
    id: int
    pid: int
    address: str


class StrayMemory(Message, frozen=True):
    id: int
    stray: str  # a sentence; "" if it holds memory on its own GPUs only


class PlaceReleased(Message, frozen=True):
    id: int


class RequestFailed(Message, frozen=True):
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


class DriverAlive(Message, frozen=True):
    """The answer to a Ping."""


ToCluster = (
    Stop
    | Ping
    | JoinCluster
    | InspectNodes
    | PlaceWorker
    | Start
    | Signal
    | GetStrayMemory
    | ReleasePlace
    | KeepPlaces
)
Answer = (
    ClusterJoined
    | NodesInspected
    | WorkerPlaced
    | Started
    | StrayMemory
    | PlaceReleased
    | RequestFailed
)
FromCluster = Answer | PlacementWaits | Lines | Measured | Exited | Nodes | DriverAlive
