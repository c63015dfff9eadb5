"""What the messages carry, without tags of their own: sampling, deltas, and what is known of
models, workers and gateways. Imported by way of `servekit.wire.messages`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

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


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what messages carry: no tag."""


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


class GatewayStatus(Value, frozen=True):
    name: str
    pid: int
    state: str
    restarts: int = 0
    rss_bytes: int = 0
    requests: int = 0
    in_flight: int = 0
