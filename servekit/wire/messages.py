"""The messages between servekit's processes, filed by who sends them to whom.

Each is a tagged `msgspec.Struct`, sent as msgpack in a length-prefixed frame
(`servekit.wire.connection`). Imperatives go to children; facts come back. Fields are only ever
added at the end and with a default, and `PROTOCOL` is raised when that is not enough.

    supervisor → worker    Load · Ping · Dump · Drain · Stop
    worker → supervisor    Loading · Ready · BootFailed · Pong
    supervisor → gateway   Topology · Drain · Stop
    gateway → supervisor   Serving · Traffic · Quarantined
    gateway → worker       Hello · Generate · Cancel
    worker → gateway       Hello · Tokens · Failed
    operator → supervisor  GetStatus · Shutdown · GetWhy · Reload
    supervisor → operator  Status · Accepted · Refused · Why
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PROTOCOL = 1

FinishReason = Literal["stop", "length", "cancelled"]
WorkerState = Literal[
    "starting",
    "loading",
    "ready",
    "stalled",  # makes no progress: it is sent nothing new, and about to be dumped and killed
    "draining",
    "backoff",
    "failed",
    "stopped",
]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all messages; the tag is the class name."""


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what messages carry: no tag."""


# ---------------------------------------------------------------- what is generated


class SamplingParams(Value, frozen=True):
    """How to choose tokens. None means the model's own default (its generation config).

    Ranges are checked at the gateway; an engine may rely on them.
    """

    max_tokens: int | None = None  # None: up to the end of the context
    temperature: float | None = None  # >= 0; 0 is greedy
    top_p: float | None = None  # (0, 1]
    top_k: int | None = None  # >= 0; 0 is off
    min_p: float | None = None  # [0, 1]
    seed: int | None = None  # signed 64 bit; None: a fresh one
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float | None = None  # > 0; 1 is off
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


class ChatMessage(Value, frozen=True):
    """One turn of a conversation, as the chat template gets it."""

    role: str
    content: str
    name: str | None = None


class Progress(Value, frozen=True):
    """How far a load is. `done` and `total` count in `unit`; total 0 means unknown."""

    phase: str  # "fetch" | "convert" | "load" | "warm-up"
    done: int = 0
    total: int = 0
    unit: Literal["bytes", "tensors", "steps", ""] = ""


class ModelInfo(Value, frozen=True):
    """What a loaded model can do; sent once by its worker."""

    max_context: int  # tokens, prompt and completion together
    slots: int  # requests the engine runs at once
    chat: bool  # it has a chat template
    architecture: str  # e.g. "LlamaForCausalLM"; "echo"
    dtype: str  # e.g. "float32"
    device: str  # e.g. "cpu", "cuda:0" as the worker sees it
    parameters: int = 0
    kv_cache_bytes: int = 0
    detail: str = ""  # one line for people: attention, batching mode
    resumes: bool = True  # it can go on after token ids that another worker has produced


# ---------------------------------------------------------------- supervisor → worker


class WorkerSpec(Value, frozen=True):
    """All that a worker needs to load its model."""

    name: str  # the worker's own name, e.g. "smollm2/0"
    model: str
    engine: str
    path: str
    revision: str | None
    device: Literal["cpu", "cuda"]
    dtype: str
    max_context: int | None
    trust_remote_code: bool
    sampling: dict[str, float | int]  # defaults from the file, by SamplingParams field
    options: dict[str, Any]  # the engine's own, already checked against its schema
    socket: str  # where the worker listens


class Load(Message, frozen=True):
    spec: WorkerSpec


class Ping(Message, frozen=True):
    seq: int


class Dump(Message, frozen=True):
    """Write the stacks of all threads to stderr."""


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


class Pong(Message, frozen=True):
    seq: int
    progress_age_s: float  # since the engine loop last made progress; 0 when it has no work
    running: int
    waiting: int
    kv_used: float  # fraction of the KV cache in use, 0 to 1
    served: int = 0  # requests completed since it was ready, the worker's own probes apart


# ---------------------------------------------------------------- supervisor → gateway


class ReplicaStatus(Value, frozen=True):
    """One worker, as seen by the supervisor."""

    name: str
    state: WorkerState
    socket: str
    pid: int
    device: str  # "cpu" or the GPU's index and name
    gpus: tuple[str, ...] = ()  # UUIDs
    progress: Progress | None = None
    reason: str = ""  # why it failed, or last died
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    rss_bytes: int = 0
    gpu_bytes: int = 0
    timings_s: dict[str, float] = {}


class ModelStatus(Value, frozen=True):
    """One model and its replicas, as seen by the supervisor."""

    name: str
    engine: str
    path: str
    created: int  # Unix time, s
    replicas: tuple[ReplicaStatus, ...]
    info: ModelInfo | None = None
    aliases: tuple[str, ...] = ()
    timeout_s: float = 600.0
    max_queue: int = 1024
    quarantine_s: float = 600.0


class Quarantined(Message, frozen=True):
    """A request that takes workers down: a gateway reports it, and every Topology repeats it."""

    fingerprint: str  # sha256 over model, prompt and parameters, hex
    model: str
    until: float  # Unix time, s; identical requests are refused until then


class Topology(Message, frozen=True):
    """The whole state, sent on every change: a gateway that missed one is right again."""

    models: tuple[ModelStatus, ...]
    draining: bool = False
    gateways: int = 1  # how many share the workers' slots
    quarantined: tuple[Quarantined, ...] = ()  # by any gateway, those that still hold


# ---------------------------------------------------------------- gateway → supervisor


class Serving(Message, frozen=True):
    """The gateway accepts connections."""


class Traffic(Message, frozen=True):
    """Counters of one gateway since it started, about once a second when they changed."""

    requests: int
    in_flight: int
    queued: dict[str, int]  # by model


# ---------------------------------------------------------------- gateway ↔ worker


class Hello(Message, frozen=True):
    """First message in both directions."""

    protocol: int
    role: Literal["gateway", "worker", "probe"]
    name: str
    info: ModelInfo | None = None  # from a worker


class Generate(Message, frozen=True):
    """Run one request. Exactly one of `prompt` and `messages` is set.

    A request that was under way elsewhere is continued: `emitted` are the token ids that worker
    had reported, `sent_chars` how many characters of their text have gone to the client.
    """

    id: int  # unique on its connection
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    emitted: list[int] = []
    sent_chars: int = 0


class Cancel(Message, frozen=True):
    id: int


class Delta(Value, frozen=True):
    """What one engine step brought to one request.

    `finish` is set on the last one, and with it the counts. `token_ids` are those sampled since
    the last Delta (the end-of-sequence token not among them); `text` may lag behind them while a
    character or a possible stop string is incomplete.
    """

    id: int
    text: str
    token_ids: list[int] = []
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Tokens(Message, frozen=True):
    """One engine step: the deltas of all its requests that belong to one gateway."""

    deltas: list[Delta]


class Failed(Message, frozen=True):
    """The request ended without an answer; `code` is a key of `errors.REQUEST_ERRORS`."""

    id: int
    code: str
    message: str
    param: str | None = None


# ---------------------------------------------------------------- operator ↔ supervisor


class GetStatus(Message, frozen=True):
    pass


class Shutdown(Message, frozen=True):
    now: bool = False  # do not drain


class GetWhy(Message, frozen=True):
    """Why is a model, or one of its replicas, as it is? Answered by Why, or Refused."""

    name: str


class Reload(Message, frozen=True):
    """Read the configuration again. Accepted, or Refused with what is wrong with it."""


class ExitRecord(Value, frozen=True):
    """One death of a worker, as far as it can be told afterwards."""

    at: float  # Unix time, s
    pid: int
    lived_s: float
    what: str  # one sentence: code or signal, and the reason
    code: int | None
    signal: int | None
    phase: str  # "loading", "ready", ...: its state when it died
    out_of_memory: str  # "", "host" or "gpu": a guess, from the kernel's counters and its words
    served: int  # requests it had completed
    running: int  # requests that were in its engine, by its last Pong
    rss_bytes: int  # when last measured
    gpu_bytes: int
    tail: tuple[str, ...]  # its last lines
    stacks: tuple[str, ...]  # of all its threads, if it was made to dump them


class ReplicaHistory(Value, frozen=True):
    """What became of one replica, the last exit last."""

    name: str
    state: str
    reason: str
    restarts: int
    next_attempt_s: float | None  # seconds from now; None where none is planned
    exits: tuple[ExitRecord, ...]


class Why(Message, frozen=True):
    """Answer to GetWhy."""

    model: str
    breaker: str  # "closed", or a sentence that says since when and until when it is open
    replicas: tuple[ReplicaHistory, ...]


class GatewayStatus(Value, frozen=True):
    name: str
    pid: int
    state: str
    restarts: int = 0
    rss_bytes: int = 0
    requests: int = 0
    in_flight: int = 0


class Status(Message, frozen=True):
    """Answer to GetStatus."""

    version: str
    pid: int
    url: str
    config: str
    started_at: float  # Unix time, s
    rss_bytes: int
    models: tuple[ModelStatus, ...]
    gateways: tuple[GatewayStatus, ...]
    draining: bool


class Accepted(Message, frozen=True):
    pass


class Refused(Message, frozen=True):
    message: str


ToWorker = Load | Ping | Dump | Drain | Stop
FromWorker = Loading | Ready | BootFailed | Pong
ToGateway = Topology | Drain | Stop
FromGateway = Serving | Traffic | Quarantined
GatewayToWorker = Hello | Generate | Cancel
WorkerToGateway = Hello | Tokens | Failed
ToSupervisor = GetStatus | Shutdown | GetWhy | Reload
FromSupervisor = Status | Accepted | Refused | Why
