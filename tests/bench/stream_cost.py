"""The gateway's CPU time for each streamed token, API by API, with one worker and many streams.

    python -m tests.bench.stream_cost [--rounds N] [--seconds S] [--streams N]

All streams get a token every 10 ms, and each token has a write of its own. The APIs take turns, so
that a disturbance hits all. To compare two versions, run this in each by turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.bench.contest import Outcome, Plan, contest
from tests.bench.load import MARK, Order, Result
from tests.integration.instance import Instance, echo

TOKENS = 8000
STEP_S = 0.01
ASKED = [{"role": "user", "content": MARK * 64}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT, PLAIN = "/v1/chat/completions", "plain chat"
MESSAGES: dict[str, Any] = {"messages": ASKED, "max_tokens": TOKENS, "stream": True}
#: By name: the model, the path and the body of a request.
REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    PLAIN: ("plain", CHAT, MESSAGES),
    "chat, thinking model": ("rich", CHAT, MESSAGES),
    "chat, tools": ("rich", CHAT, MESSAGES | {"tools": [TOOL]}),
    "chat, two choices": ("plain", CHAT, MESSAGES | {"n": 2}),
    "Responses": (
        "plain",
        "/v1/responses",
        {"input": MARK * 64, "max_output_tokens": TOKENS, "stream": True},
    ),
    "Anthropic": ("plain", "/v1/messages", MESSAGES),
    "Ollama": (
        "plain",
        "/api/chat",
        {"messages": ASKED, "options": {"num_predict": TOKENS}, "stream": True},
    ),
}


def measure(folder: Path, plan: Plan, streams: int) -> dict[str, Outcome]:
    """Return the results of all requests, by name."""
    options: dict[str, Any] = {"slots": 2 * streams, "max_context": 100_000, "step_s": STEP_S}
    rich = {"tool_parser": "hermes", "reasoning_parser": "think"}
    models = [echo("plain", **options), echo("rich", **options) | rich]
    with Instance.up(folder, models) as instance:
        status = instance.until_settled()
        port = urlsplit(status.url).port or 0
        pid = status.gateways[0].pid
        orders = {
            name: Order(
                port, path, json.dumps({"model": model, **body}), streams, (pid,), stream=True
            )
            for name, (model, path, body) in REQUESTS.items()
        }
        return contest(orders, plan)


def _us_per_token(result: Result) -> float:
    return 1e6 * result.cpu_s[0] / result.tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stream_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--streams", type=int, default=64)
    given = parser.parse_args(arguments)
    plan = Plan(rounds=given.rounds, seconds=given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = measure(Path(folder), plan, given.streams)
    plain_us = outcomes[PLAIN].median(_us_per_token)
    for name, outcome in outcomes.items():
        us = outcome.median(_us_per_token)
        least_us = min(outcome.each(_us_per_token))
        tokens = sum(result.tokens for result in outcome.results)
        writes = sum(result.writes for result in outcome.results)
        print(
            f"{name:21} {us:5.2f} µs a token (least {least_us:5.2f}), {us / plain_us:.2f} of"
            f" {PLAIN}; {tokens / max(1, writes):.2f} tokens a write",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
