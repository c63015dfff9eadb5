"""The protocol between `servekit bench` and its client processes: JSON lines, never pickle.

A client reads one ClientLoad and one Go; the end of its stdin means: stop now. It writes Ready,
then Reports, then one Ended. All times are `time.monotonic`, which processes of a machine share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from servekit.bench.lengths import Lengths

Api = Literal["chat", "completions", "embeddings"]
#: How a request ended. `http` comes with a status; `unfinished`: the measurement ended first.
Outcome = Literal["ok", "http", "connect", "timeout", "cut", "frame", "protocol", "unfinished"]

PATHS: dict[Api, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
}


class Target(msgspec.Struct, frozen=True):
    """The server's address. `base` is the prefix of the API's paths, such as /v1."""

    host: str
    port: int
    base: str
    tls: bool = False
    ca: str | None = None  # a PEM file with the authority to trust
    insecure: bool = False  # accept any certificate
    key: str | None = None

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}{self.base}"


class Asking(msgspec.Struct, frozen=True):
    """The parameters of the requests."""

    api: Api
    model: str
    stream: bool
    prompt_tokens: Lengths
    output_tokens: Lengths
    turns: Lengths
    shared_prefix_tokens: int = 0
    prefixes: int = 1
    ignore_eos: bool = False
    extra: dict[str, object] = {}
    dataset: str | None = None
    #: Characters per token in generated prompts, and tokens of each prompt beside its text.
    token_chars: float = 4.0
    overhead_tokens: float = 0.0


class ClientLoad(msgspec.Struct, frozen=True):
    """The part of one client process in a load. Exactly one of `users` and `rate` is set."""

    target: Target
    asking: Asking
    index: int  # of this client; the clients share the numbers of conversations
    clients: int
    seed: int
    users: int | None  # closed loop: concurrent users, each with one request at a time
    rate: float | None  # open loop: arrivals per second
    requests: int | None  # of this client; None: until the end of `duration_s`
    duration_s: float | None
    warmup: int
    timeout_s: float


class Go(msgspec.Struct, frozen=True):
    """The start time of the measurement."""

    at: float


class Record(msgspec.Struct, array_like=True, gc=False):
    """A request. Times are monotonic; `first` and `last` are those of chunks with text."""

    outcome: Outcome
    began: float
    ended: float
    first: float | None = None
    last: float | None = None
    chunks: int = 0  # events of a stream with text
    chunks_in_time: int = 0  # those before the measurement's end
    longest_gap_s: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # both as counted by the server
    status: int = 0
    message: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The warm-up is over and connections are open."""


class Report(msgspec.Struct, tag="report"):
    """The data since the previous report."""

    records: list[Record]
    gaps: dict[int, int]  # between chunks of a stream: a Histogram's counts
    sent: int
    in_flight: int
    chunks: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The end of this client. Lags and lateness are Histograms' counts, in seconds."""

    ended_at: float  # when it stopped sending, or got its last answer
    cpu_cores: float  # used by itself, during the measurement
    lags: dict[int, int]  # delays of timers in its event loop
    late: dict[int, int]  # delays of arrivals of an open loop
    resent: int  # requests repeated after a kept connection was closed


FromClient = Ready | Report | Ended
