"""What crosses between `servekit bench` and its client processes: JSON lines, never pickle.

To a client come one Order and one Go; the end of its stdin means: stop now. From it come Ready,
then Reports, then one Ended. All times are `time.monotonic`, which processes of a machine share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from servekit.bench.lengths import Lengths

Api = Literal["chat", "completions", "embeddings"]
#: How a request ended. `http` has a status beside it; `unfinished`: the measurement ended first.
Fate = Literal["ok", "http", "connect", "timeout", "cut", "frame", "protocol", "unfinished"]

PATHS: dict[Api, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
}


class Target(msgspec.Struct, frozen=True):
    """Where the server is. `base` is the path that the API's paths begin with, such as /v1."""

    host: str
    port: int
    base: str
    tls: bool = False
    ca: str | None = None  # a PEM file with the authority to trust
    insecure: bool = False  # any certificate will do
    key: str | None = None

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}{self.base}"


class Asking(msgspec.Struct, frozen=True):
    """What requests are like."""

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
    #: Characters of one token in made-up prompts, and tokens that each prompt has beside its text.
    token_chars: float = 4.0
    overhead_tokens: float = 0.0


class Order(msgspec.Struct, frozen=True):
    """The part of one client process in one load. Exactly one of `users` and `rate` is set."""

    target: Target
    asking: Asking
    index: int  # of this client, and of how many: they share the numbers of conversations
    clients: int
    seed: int
    users: int | None  # closed loop: so many at once, each asks again when it is answered
    rate: float | None  # open loop: arrivals per second
    requests: int | None  # of this client; None: until `duration_s` is over
    duration_s: float | None
    warmup: int
    timeout_s: float


class Go(msgspec.Struct, frozen=True):
    """Begin at this time."""

    at: float


class Record(msgspec.Struct, array_like=True, gc=False):
    """One request. Times are monotonic; `first` and `last` are those of text in a stream."""

    fate: Fate
    began: float
    ended: float
    first: float | None = None
    last: float | None = None
    chunks: int = 0  # events of a stream that brought text
    chunks_in_time: int = 0  # of them, before the measurement's end
    longest_gap_s: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # both by the server's own count
    status: int = 0
    message: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The warm-up is over and connections are open."""


class Report(msgspec.Struct, tag="report"):
    """What came since the last one."""

    records: list[Record]
    gaps: dict[int, int]  # between chunks of one stream: a Histogram's counts
    sent: int
    in_flight: int
    chunks: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """This client is done. Lags and lateness are Histograms' counts, in seconds."""

    ended_at: float  # when it stopped asking, or its last answer came
    cpu_cores: float  # of its own, while it asked
    lags: dict[int, int]  # how late its event loop came to a timer
    late: dict[int, int]  # how late arrivals of an open loop were sent
    resent: int  # requests that met a kept connection which was just being closed


FromClient = Ready | Report | Ended
