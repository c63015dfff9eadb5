"""The document of `--json`. Its schema is stable: names stay, new ones may be added.

`servekit bench --schema` prints it as a JSON schema. Times are in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

#: Incremented when a name changes its meaning or is removed.
VERSION = 1


class Spread(msgspec.Struct, frozen=True):
    """The distribution of values over requests, or over gaps between chunks."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    percentiles: Annotated[list[float], Meta(description="From 0 to 100, 101 numbers.")]


class Failure(msgspec.Struct, frozen=True):
    kind: Annotated[
        str,
        Meta(
            description="`http STATUS`; `connect`: no connection; `timeout`; `cut`: the connection "
            "or the stream ended before the answer did; `frame`: an error in the place of an "
            "answer, as within a stream; `protocol`: not HTTP, or no answer of OpenAI's API."
        ),
    ]
    count: int
    message: Annotated[str, Meta(description="The message of the first failure.")]


class Goodput(msgspec.Struct, frozen=True):
    slo: Annotated[dict[str, float], Meta(description="Limits on each request, in seconds.")]
    requests_per_s: Annotated[float, Meta(description="Requests per second that kept all limits.")]
    share: Annotated[
        float, Meta(description="Their share of all requests that ended, failed ones included.")
    ]


class ClientFigures(msgspec.Struct, frozen=True):
    """The load generator about itself."""

    processes: int
    cpu_cores: Annotated[
        list[float], Meta(description="CPU use of each process while it sent requests.")
    ]
    lag_p99_s: Annotated[float, Meta(description="The delay of the event loops' timers.")]
    late_p99_s: Annotated[float | None, Meta(description="The delay of arrivals; open loop only.")]
    resent: Annotated[
        int, Meta(description="Requests sent again: the server was closing a kept connection.")
    ]
    limits: Annotated[
        list[str],
        Meta(description="Ways in which the load generator was the limit; empty is good."),
    ]


class Second(msgspec.Struct, frozen=True):
    requests: Annotated[int, Meta(description="Requests answered within this second.")]
    failed: int
    output_tokens: Annotated[
        float, Meta(description="Output tokens of these requests, counted at their end.")
    ]


class Run(msgspec.Struct, frozen=True):
    """The load of a measurement."""

    concurrency: Annotated[int | None, Meta(description="Closed loop: users at once.")]
    rate: Annotated[float | None, Meta(description="Open loop: arrivals per second.")]
    duration_s: Annotated[
        float,
        Meta(
            description="Time from the first request to the end of the load, or to the last answer."
        ),
    ]
    interrupted: bool
    completed: Annotated[int, Meta(description="Requests answered.")]
    failed: int
    unfinished: Annotated[int, Meta(description="Requests cut off by an interruption.")]
    requests_per_s: Annotated[
        float, Meta(description="Requests answered within the duration, per second.")
    ]
    output_tokens_per_s: Annotated[
        float, Meta(description="Output tokens of requests answered within the duration.")
    ]
    prompt_tokens_per_s: Annotated[
        float | None, Meta(description="Prompt tokens of the same requests; null: not reported.")
    ]
    tokens_by: Annotated[
        str,
        Meta(
            description="The source of token counts: `usage` (the server), `chunks` (one each), "
            "`both` (the server reported some), `none` (there are none)."
        ),
    ]
    prompt_tokens: Spread | None
    output_tokens: Spread | None
    ttft_s: Annotated[Spread | None, Meta(description="Time to the first chunk with text.")]
    itl_s: Annotated[
        Spread | None, Meta(description="Time between two chunks of a stream, over all gaps.")
    ]
    tpot_s: Annotated[Spread | None, Meta(description="Time per output token after the first.")]
    e2e_s: Annotated[Spread | None, Meta(description="Time to the last byte.")]
    goodput: Goodput | None
    errors: list[Failure]
    client: ClientFigures
    timeline: Annotated[list[Second], Meta(description="An entry for each second from the start.")]


class Result(msgspec.Struct, frozen=True):
    """The result of `servekit bench`."""

    version: int
    servekit: Annotated[str, Meta(description="The version of servekit that measured.")]
    began_at: Annotated[str, Meta(description="UTC, ISO 8601.")]
    url: str
    asked: Annotated[dict[str, Any], Meta(description="The options that describe the requests.")]
    runs: list[Run]


def result_schema() -> dict[str, Any]:
    """Return the JSON schema of a result."""
    return msgspec.json.schema(Result)
