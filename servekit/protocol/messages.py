"""The messages between servekit's processes, by sender and receiver.

Each is a tagged `msgspec.Struct`, sent as msgpack in a length-prefixed frame
(`servekit.protocol.transport.connection`). Commands to children are imperatives; their reports are
facts. Fields are only ever added at the end with a default; `PROTOCOL` is raised for other changes.

    supervisor → worker    Load · Proceed · Ping · Drain · Stop · Sleep · Wake · Renew
                           LoadAdapter · UnloadAdapter · SetAdapters
    worker → supervisor    Loading · Ready · BootFailed · EngineDied · Pong
                           Asleep · Awake · SleepFailed · PhaseReport · GatewayConnected
                           AdapterLoaded · AdapterUnloaded · AdapterRefused
    supervisor → gateway   Topology · Drain · Stop · Ping · Renew
                           KeyUsage · SourceReport (of other gateways) · KeyBudgets
    gateway → supervisor   Serving · Traffic · Quarantined · KeyUsage · AdapterUnused
                           TopologyApplied · ModelDemand · KeepAlive · Counted · SourceReport
    gateway → worker       Hello · Generate · Cancel · Borrow · Body · WindowUpdate
    worker → gateway       Hello · TokenBatch · DeltaBatch · Failed · Cancelled · Lent
                           IsolationStarted · IsolationEnded
    operator → supervisor  GetStatus · Shutdown · GetWhy · Reload · SetProfile · Restart
                           AddAdapter · RemoveAdapter · GetAdapters · SetResidency · GetMetrics
                           CreateLink · RedeemLink (of a gateway)
    supervisor → operator  Status · Accepted · Refused · Why · Adapters · Figures · Link

Modules beside this one hold the messages of adapters, residency, forwarding, operators
(`admin_messages`), start-up (`startup_messages`) and metrics (`metrics_messages`);
`transport.credentials` holds those of certificates, `transport.resumable_channel` those that open a
channel to another machine.
"""

from __future__ import annotations

from typing import Any, Literal

from servekit.protocol import adapters as a
from servekit.protocol import residency as r
from servekit.protocol.access import AccessRules, KeyBudgets, KeyRule, KeyUse
from servekit.protocol.base import Message, Value
from servekit.protocol.control import metrics_messages as c
from servekit.protocol.control import startup_messages as s
from servekit.protocol.control.admin_messages import (
    Accepted,
    CreateLink,
    GetStatus,
    GetWhy,
    Link,
    RedeemLink,
    Refused,
    Reload,
    Restart,
    SetProfile,
    Shutdown,
    Status,
    Why,
)
from servekit.protocol.forwarding import Body, HttpPart, HttpRequest, WindowUpdate
from servekit.protocol.speech import SpeechParams, SpokenSegment, SpokenWord, Transcript
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
    Media,
    ModelInfo,
    ModelStatus,
    PoolingParams,
    Preset,
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
    "UNKNOWN_TOKEN",
    "Accepted",
    "AccessRules",
    "Body",
    "BootFailed",
    "Borrow",
    "Cancel",
    "Cancelled",
    "Capability",
    "ChatMessage",
    "Continuation",
    "CreateLink",
    "DeathReport",
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
    "HttpPart",
    "HttpRequest",
    "IsolationEnded",
    "IsolationStarted",
    "KeyBudgets",
    "KeyRule",
    "KeyUsage",
    "KeyUse",
    "Lent",
    "Link",
    "Load",
    "Loading",
    "Media",
    "Message",
    "ModelInfo",
    "ModelStatus",
    "Ping",
    "Pong",
    "PoolingParams",
    "Preset",
    "Proceed",
    "Progress",
    "Prompt",
    "PromptToken",
    "Quarantined",
    "Ready",
    "RedeemLink",
    "Refused",
    "Reload",
    "ReplicaHistory",
    "ReplicaStatus",
    "Restart",
    "SamplingParams",
    "Serving",
    "SetProfile",
    "Shutdown",
    "SourceReport",
    "SpeechParams",
    "SpokenSegment",
    "SpokenWord",
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
    "Transcript",
    "Why",
    "WindowUpdate",
    "WorkerSpec",
    "WorkerState",
    "WorkerToGateway",
]

PROTOCOL = 11
#: New tokens after which a request is no longer suspected of killing workers.
PROOF_TOKENS = 2
#: Stands for each token of an engine that does not know its token ids.
UNKNOWN_TOKEN = -1


# ---------------------------------------------------------------- supervisor → worker


class Load(Message, frozen=True):
    """Load a model. With `waits`, only import the engine, and wait for `Proceed`."""

    spec: WorkerSpec
    waits: bool = False


class Proceed(Message, frozen=True):
    """Use the GPUs: their memory is free, and no other worker loads there."""


class Ping(Message, frozen=True):
    seq: int


class Drain(Message, frozen=True):
    """Accept no new requests; exit with 0 when the requests in flight are done."""


class Stop(Message, frozen=True):
    """Exit now."""


# ---------------------------------------------------------------- worker → supervisor


class Loading(Message, frozen=True):
    progress: Progress


class Ready(Message, frozen=True):
    """The worker serves: a warm-up token has come back along the path that requests take."""

    info: ModelInfo
    timings_s: dict[str, float]  # by phase: import, fetch, convert, load, warm-up


class BootFailed(Message, frozen=True):
    message: str
    permanent: bool


class EngineDied(Message, frozen=True):
    """The engine has died and the worker exits at once; `cause` is the first line of the error."""

    cause: str


class Pong(Message, frozen=True):
    seq: int
    progress_age_s: float  # since the engine loop last made progress; 0 when it has no work
    running: int
    waiting: int
    kv_used: float  # fraction of the KV cache in use, 0 to 1
    served: int = 0  # requests completed, or units of 8 tokens; without its own probes
    trouble: str = ""  # a sentence: why a healthy worker cannot serve now
    finished: int = 0  # requests completed, without its own probes
    draft_tokens: int = 0  # tokens proposed by speculative decoding
    accepted_tokens: int = 0  # those of them that were accepted


# ---------------------------------------------------------------- supervisor → gateway


class Quarantined(Message, frozen=True):
    """A request that crashes workers: a gateway reports it, and every Topology repeats it.

    Alternatively, all requests of a key or an address to this model.
    """

    fingerprint: str  # sha256 over model, prompt and parameters, hex; or "key:…", "address:…"
    model: str
    until: float  # Unix time, s, by its gateway's clock: for people
    for_s: float = 0.0  # remaining time, from when this is sent
    generation: str = ""  # of the workers that it crashes; others may run it


class Topology(Message, frozen=True):
    """The whole state, sent on every change, so that a missed message does no lasting harm."""

    models: tuple[ModelStatus, ...]
    draining: bool = False
    gateways: int = 1  # gateways that share the workers' slots
    quarantined: tuple[Quarantined, ...] = ()  # by any gateway, if still in force
    access: AccessRules = AccessRules()
    serial: int = 0  # counts the messages to one gateway


# ---------------------------------------------------------------- gateway → supervisor


class Serving(Message, frozen=True):
    """The gateway accepts connections."""


class Traffic(Message, frozen=True):
    """Counters of one gateway since its start, sent about once a second if changed."""

    requests: int
    in_flight: int
    queued: dict[str, int]  # by model
    tokens: dict[str, int] = {}  # by model, given out since the gateway started
    oldest_s: dict[str, float] = {}  # by model with a queue: the longest wait


class KeyUsage(Message, frozen=True):
    """Usage of limited keys at a gateway, sent once a second; other gateways count it as well."""

    gateway: str
    uses: tuple[KeyUse, ...]


class DeathReport(Value, frozen=True):
    """One gateway's part in a worker's death; a later report replaces an earlier one."""

    worker: str  # its socket: the same for all gateways, another one for its successor
    sure: bool  # the worker had announced that one request ran alone
    age_s: float
    open: int  # requests that may have caused it
    charged: dict[str, int]  # of these, requests that ended without an answer, by mark


class SourceReport(Message, frozen=True):
    """News of the sources of requests that may have killed workers, for the other gateways.

    Sent only after deaths. A mark is a source ("key:…", "address:…") or a fingerprint.
    """

    gateway: str
    deaths: tuple[DeathReport, ...] = ()
    passed: dict[str, int] = {}  # by source: completed requests that ran alone; 0: any completed
    refused: tuple[str, ...] = ()  # sources, once for each refusal

    def charged_sources(self) -> set[str]:
        """Return the sources that are charged with a death, without fingerprints."""
        charged = (item for death in self.deaths for item in death.charged.items())
        return {mark for mark, count in charged if count and ":" in mark}


# ---------------------------------------------------------------- gateway ↔ worker


class Hello(Message, frozen=True):
    """The first message in both directions."""

    protocol: int
    role: Literal["gateway", "worker", "probe", "supervisor"]
    name: str
    info: ModelInfo | None = None  # from a worker


class Generate(Message, frozen=True):
    """Run one request. Exactly one of `prompt` and `messages` is set to generate text.

    To continue a request of another worker, `emitted` has the token ids which that worker reported,
    `sent_chars` the number of characters of their text that the client has. A worker of another
    generation than that of `continuation` refuses with the code "model_changed"; a worker with less
    context ends it earlier, with "length". An engine without token ids continues `answered`, and
    `emitted` has an UNKNOWN_TOKEN for each token of it.

    A request that is suspected of killing workers (`alone_until`) is isolated: the worker first
    tells
    all gateways with `IsolationStarted`, runs no other unproven request beside it, and starts no
    further request until it has produced `PROOF_TOKENS`, or is done.
    """

    id: int  # unique on its connection
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    emitted: list[int] = []
    sent_chars: int = 0
    answered: str = ""  # the text so far, of a continuation `by_text`
    #: "embed", "classify" and "score" take `inputs`, "detokenize" ids, "forward" `http`,
    #: "transcribe" `speech`.
    task: Task = "generate"
    inputs: list[str | list[int]] = []
    tools: list[dict[str, Any]] = []  # OpenAI's definitions, as the chat template gets them
    template: dict[str, Any] = {}  # extra arguments of the chat template
    continues: bool = False  # the last message is the beginning of the answer
    alone_until: Literal["", "proven", "done"] = ""
    adapter: str = ""  # the name of a loaded adapter; "": the base model
    must_call: bool = False  # force a tool call; for engines without a grammar for it
    one_call: bool = False  # at most one tool call; likewise
    request: str = ""  # the client's request id, for the log
    trace: str = ""  # W3C traceparent of the request's span; "": not traced
    continuation: Continuation | None = None  # from the first worker, whose generation must match
    cache_salt: str = ""  # only requests with equal salts share the prefix cache
    http: HttpRequest | None = None
    #: Of `http` and `speech`; if it is shorter than stated there, Body messages follow.
    body: bytes = b""
    queries: list[str] = []  # "score": of each of `inputs`, the documents, or one for all
    pooling: PoolingParams | None = None  # for `inputs`; None: the defaults
    speech: SpeechParams | None = None

    @property
    def body_bytes(self) -> int:
        """Return the size of the whole body."""
        stated = self.http or self.speech
        return 0 if stated is None else stated.size_bytes


class Cancel(Message, frozen=True):
    id: int
    tells: bool = False  # answer with Cancelled once it has left the engine


class Borrow(Message, frozen=True):
    """Ask for slots that other gateways do not use: requests wait, and our share is in use.

    Holds until the next Borrow; a `share` of 0 returns the borrowed slots.
    """

    share: int  # slots that this gateway may use without asking


class Lent(Message, frozen=True):
    """The number of slots that a gateway may use beyond its share; sent on every change.

    If fewer than those in use, running requests continue, and ended ones are not replaced.
    """

    slots: int
    contested: bool = False  # other gateways ask for slots, too


class DeltaBatch(Message, frozen=True):
    """The deltas of one engine step for one gateway, except those of a TokenBatch before it."""

    deltas: list[Delta]


class Failed(Message, frozen=True):
    """The request ended with an error; `code` is a key of `errors.REQUEST_ERRORS`."""

    id: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Cancelled(Message, frozen=True):
    """A cancelled request has left the engine, including the step that was running."""

    id: int


class IsolationStarted(Message, frozen=True):
    """A suspect is about to start alone, sent to all gateways: no other unproven request runs now.

    Requests that have brought PROOF_TOKENS continue; the others are held back, not started, so that
    they are not suspected if the worker dies.
    """

    id: int = 0  # the suspect, to the gateway it came from; 0 to the others


class IsolationEnded(Message, frozen=True):
    """The isolation is over: held requests start after this message, and new ones may be sent."""


_OfAdapters = a.LoadAdapter | a.UnloadAdapter | a.SetAdapters
ToWorker = Load | Proceed | Ping | Drain | Stop | Renew | _OfAdapters | r.Sleep | r.Wake
_OnAdapters = a.AdapterLoaded | a.AdapterUnloaded | a.AdapterRefused
_OnResidency = r.Asleep | r.Awake | r.SleepFailed
_OnLife = Loading | Ready | BootFailed | EngineDied | Pong | s.PhaseReport | s.GatewayConnected
FromWorker = _OnLife | _OnAdapters | _OnResidency
ToGateway = Topology | Drain | Stop | KeyUsage | SourceReport | Ping | Renew | KeyBudgets
_Use = r.ModelDemand | r.KeepAlive
FromGateway = (
    Serving
    | Traffic
    | Quarantined
    | KeyUsage
    | SourceReport
    | a.AdapterUnused
    | a.TopologyApplied
    | _Use
    | c.Counted
)
GatewayToWorker = Hello | Generate | Cancel | Borrow | Body | WindowUpdate
WorkerToGateway = (
    Hello | TokenBatch | DeltaBatch | Failed | IsolationStarted | IsolationEnded | Cancelled | Lent
)
_AboutAdapters = a.AddAdapter | a.RemoveAdapter | a.GetAdapters
ToSupervisor = (
    GetStatus
    | Shutdown
    | GetWhy
    | Reload
    | SetProfile
    | Restart
    | _AboutAdapters
    | r.SetResidency
    | c.GetMetrics
    | CreateLink
    | RedeemLink
)
FromSupervisor = Status | Accepted | Refused | Why | a.Adapters | c.Figures | Link
