"""The messages between servekit's processes, filed by who sends them to whom.

Each is a tagged `msgspec.Struct`, sent as msgpack in a length-prefixed frame
(`servekit.protocol.transport.connection`). Imperatives go to children; facts come back. Fields are
only ever added at the end and with a default, and `PROTOCOL` is raised when that is not enough.

    supervisor → worker    Load · Ping · Drain · Stop · LoadAdapter · UnloadAdapter · Sleep · Wake
                           SetAdapters · Renew
    worker → supervisor    Loading · Ready · BootFailed · EngineDied · Pong
                           Asleep · Awake · SleepFailed · PhaseReport · GatewayConnected
                           AdapterLoaded · AdapterUnloaded · AdapterRefused
    supervisor → gateway   Topology · Drain · Stop · KeyUsage, of the others · Renew
    gateway → supervisor   Serving · Traffic · Quarantined · KeyUsage · AdapterUnused
                           TopologyApplied · ModelDemand · KeepAlive · Counted
    gateway → worker       Hello · Generate · Cancel · Borrow
    worker → gateway       Hello · TokenBatch · DeltaBatch · Failed · Cancelled · Lent
                           IsolationStarted · IsolationEnded
    operator → supervisor  GetStatus · Shutdown · GetWhy · Reload
                           AddAdapter · RemoveAdapter · GetAdapters · SetResidency · GetMetrics
    supervisor → operator  Status · Accepted · Refused · Why · Adapters · Figures

Modules beside this one hold the messages of adapters, residency, operators (`admin_messages`),
start-up (`startup_messages`) and metrics (`metrics_messages`); `transport.credentials` holds those
of certificates, `transport.resumable_channel` those that open a channel to another machine.
"""

from __future__ import annotations

from typing import Any, Literal

from servekit.protocol import adapters as a
from servekit.protocol import metrics_messages as c
from servekit.protocol import residency as r
from servekit.protocol import startup_messages as s
from servekit.protocol.access import AccessRules, KeyRule, KeyUse
from servekit.protocol.admin_messages import (
    Accepted,
    GetStatus,
    GetWhy,
    Refused,
    Reload,
    Shutdown,
    Status,
    Why,
)
from servekit.protocol.base import Message
from servekit.protocol.transport.credentials import Renew
from servekit.protocol.types import (
    Capability,
    ChatMessage,
    Continuation,
    Delta,
    Dialect,
    GatewayStatus,
    GpuStatus,
    Grammar,
    ModelInfo,
    ModelStatus,
    Progress,
    Prompt,
    PromptToken,
    ReplicaHistory,
    ReplicaStatus,
    SamplingParams,
    Task,
    TokenBatch,
    TokenLogprob,
    ToolCall,
    WorkerSpec,
    WorkerState,
)

__all__ = [
    "PROOF_TOKENS",
    "PROTOCOL",
    "Accepted",
    "AccessRules",
    "BootFailed",
    "Borrow",
    "Cancel",
    "Cancelled",
    "Capability",
    "ChatMessage",
    "Continuation",
    "Delta",
    "DeltaBatch",
    "Dialect",
    "Drain",
    "EngineDied",
    "Failed",
    "FromGateway",
    "FromSupervisor",
    "FromWorker",
    "GatewayStatus",
    "GatewayToWorker",
    "Generate",
    "GetStatus",
    "GetWhy",
    "GpuStatus",
    "Grammar",
    "Hello",
    "IsolationEnded",
    "IsolationStarted",
    "KeyRule",
    "KeyUsage",
    "KeyUse",
    "Lent",
    "Load",
    "Loading",
    "Message",
    "ModelInfo",
    "ModelStatus",
    "Ping",
    "Pong",
    "Progress",
    "Prompt",
    "PromptToken",
    "Quarantined",
    "Ready",
    "Refused",
    "Reload",
    "ReplicaHistory",
    "ReplicaStatus",
    "SamplingParams",
    "Serving",
    "Shutdown",
    "Status",
    "Stop",
    "ToGateway",
    "ToSupervisor",
    "ToWorker",
    "TokenBatch",
    "TokenLogprob",
    "ToolCall",
    "Topology",
    "Traffic",
    "Why",
    "WorkerSpec",
    "WorkerState",
    "WorkerToGateway",
]

PROTOCOL = 4
#: New tokens that show that it isn't this request that kills workers; see `gateway.fate`.
PROOF_TOKENS = 2


# ---------------------------------------------------------------- supervisor → worker


class Load(Message, frozen=True):
    spec: WorkerSpec


class Ping(Message, frozen=True):
    seq: int


class Drain(Message, frozen=True):
    """Take no new work; exit 0 when what is in flight is done."""


class Stop(Message, frozen=True):
    """Exit now."""


# ---------------------------------------------------------------- worker → supervisor


class Loading(Message, frozen=True):
    progress: Progress


class Ready(Message, frozen=True):
    """A warm-up token has come back along the path that requests take."""

    info: ModelInfo
    timings_s: dict[str, float]  # by phase: import, fetch, convert, load, warm-up


class BootFailed(Message, frozen=True):
    message: str
    permanent: bool


class EngineDied(Message, frozen=True):
    """The engine has died, and the worker exits at once; `cause` is the first line of its error."""

    cause: str


class Pong(Message, frozen=True):
    seq: int
    progress_age_s: float  # since the engine loop last made progress; 0 when it has no work
    running: int
    waiting: int
    kv_used: float  # fraction of the KV cache in use, 0 to 1
    served: int = 0  # requests completed, or as many times 8 tokens; its own probes apart
    trouble: str = ""  # why it cannot serve now, though nothing is wrong with it: a sentence
    finished: int = 0  # requests completed, its own probes apart


# ---------------------------------------------------------------- supervisor → gateway


class Quarantined(Message, frozen=True):
    """A request that takes workers down: a gateway reports it, and every Topology repeats it.

    Or all of a key, or of an address, to this model.
    """

    fingerprint: str  # sha256 over model, prompt and parameters, hex; or "key:…", "address:…"
    model: str
    until: float  # Unix time, s, by its gateway's clock: for people
    for_s: float = 0.0  # it is refused for so long from when this is sent
    generation: str = ""  # that it takes down; another one is free of it


class Topology(Message, frozen=True):
    """The whole state, sent on every change: a gateway that missed one is right again."""

    models: tuple[ModelStatus, ...]
    draining: bool = False
    gateways: int = 1  # how many share the workers' slots
    quarantined: tuple[Quarantined, ...] = ()  # by any gateway, those that still hold
    access: AccessRules = AccessRules()
    serial: int = 0  # of those that one gateway was sent


# ---------------------------------------------------------------- gateway → supervisor


class Serving(Message, frozen=True):
    """The gateway accepts connections."""


class Traffic(Message, frozen=True):
    """Counters of one gateway since it started, about once a second when they changed."""

    requests: int
    in_flight: int
    queued: dict[str, int]  # by model
    tokens: dict[str, int] = {}  # by model, given out since the gateway started
    oldest_s: dict[str, float] = {}  # by model where some wait: how long the first has waited


class KeyUsage(Message, frozen=True):
    """What limited keys have used at a gateway, once a second; the others count it, too."""

    gateway: str
    uses: tuple[KeyUse, ...]


# ---------------------------------------------------------------- gateway ↔ worker


class Hello(Message, frozen=True):
    """First message in both directions."""

    protocol: int
    role: Literal["gateway", "worker", "probe", "supervisor"]
    name: str
    info: ModelInfo | None = None  # from a worker


class Generate(Message, frozen=True):
    """Run one request. Exactly one of `prompt` and `messages` is set.

    A request that was under way elsewhere is continued: `emitted` are the token ids that worker
    had reported, `sent_chars` how many characters of their text have gone to the client. A worker
    of another generation than `continuation` says refuses it with the code "model_changed"; one
    with less room ends it sooner, by "length".

    A request that is suspected of killing workers is started beside nothing unproven, from
    whichever gateway, once the gateways have been told with `IsolationStarted`; and nothing is
    started beside it until it has brought `PROOF_TOKENS`, or is done.
    """

    id: int  # unique on its connection
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    emitted: list[int] = []
    sent_chars: int = 0
    task: Task = "generate"  # "embed" takes `inputs`, "detokenize" a `prompt` of token ids
    inputs: list[str | list[int]] = []
    tools: list[dict[str, Any]] = []  # OpenAI's definitions, as the chat template gets them
    template: dict[str, Any] = {}  # further arguments of the chat template
    continues: bool = False  # the last message is the assistant's own beginning, to be gone on with
    alone_until: Literal["", "proven", "done"] = ""
    adapter: str = ""  # one that the worker has loaded; "": the base model
    must_call: bool = False  # a tool; for engines that are told so, not held to it by a grammar
    one_call: bool = False  # at most; likewise
    request: str = ""  # what its client knows it by, for the log
    trace: str = ""  # W3C traceparent of the span that it is; "": it is not traced
    continuation: Continuation | None = None  # as a worker told it: only its like may go on
    cache_salt: str = ""  # the prefix cache is shared with requests of the same one only


class Cancel(Message, frozen=True):
    id: int
    tells: bool = False  # answer with Cancelled once it can do no harm any more


class Borrow(Message, frozen=True):
    """Lend us slots that other gateways do not use: requests wait, and our share is in use.

    It holds until a later one; a `share` of 0 gives back what was lent.
    """

    share: int  # slots that we use without asking


class Lent(Message, frozen=True):
    """So many slots may be used beyond the share; said again with each change.

    Fewer than are in use: those in use run on, and what ends makes room for others.
    """

    slots: int


class DeltaBatch(Message, frozen=True):
    """An engine step's deltas for one gateway, but those that a OneEach before it has told."""

    deltas: list[Delta]


class Failed(Message, frozen=True):
    """The request ended without an answer; `code` is a key of `errors.REQUEST_ERRORS`."""

    id: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Cancelled(Message, frozen=True):
    """A request has left the engine, the step that ran when it was cancelled included."""

    id: int


class IsolationStarted(Message, frozen=True):
    """Said to all gateways before a suspect is started: from here on nothing unproven runs but it.

    Of the requests of the gateway that hears it, those that have brought PROOF_TOKENS run on, and
    the others are held, not started: if the worker dies it wasn't they.
    """

    id: int = 0  # the suspect, to the gateway it came from; 0 to the others


class IsolationEnded(Message, frozen=True):
    """Nobody is alone any more: what was held is started after this, and more may come."""


_OfAdapters = a.LoadAdapter | a.UnloadAdapter | a.SetAdapters
ToWorker = Load | Ping | Drain | Stop | Renew | _OfAdapters | r.Sleep | r.Wake
_OnAdapters = a.AdapterLoaded | a.AdapterUnloaded | a.AdapterRefused
_OnResidency = r.Asleep | r.Awake | r.SleepFailed
_OnLife = Loading | Ready | BootFailed | EngineDied | Pong | s.PhaseReport | s.GatewayConnected
FromWorker = _OnLife | _OnAdapters | _OnResidency
ToGateway = Topology | Drain | Stop | KeyUsage | Ping | Renew
_Use = r.ModelDemand | r.KeepAlive
FromGateway = (
    Serving
    | Traffic
    | Quarantined
    | KeyUsage
    | a.AdapterUnused
    | a.TopologyApplied
    | _Use
    | c.Counted
)
GatewayToWorker = Hello | Generate | Cancel | Borrow
WorkerToGateway = (
    Hello | TokenBatch | DeltaBatch | Failed | IsolationStarted | IsolationEnded | Cancelled | Lent
)
_AboutAdapters = a.AddAdapter | a.RemoveAdapter | a.GetAdapters
ToSupervisor = (
    GetStatus | Shutdown | GetWhy | Reload | _AboutAdapters | r.SetResidency | c.GetMetrics
)
FromSupervisor = Status | Accepted | Refused | Why | a.Adapters | c.Figures
