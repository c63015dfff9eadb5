"""A result with something of everything, for tests of what is made of it."""

from __future__ import annotations

from servekit.bench.aggregator import Machine, Tally
from servekit.bench.client.client_protocol import Ended, Record, Report
from servekit.bench.output.result import VERSION, Result
from servekit.bench.percentiles import bucket_of

ASKED: dict[str, object] = {
    "model": "<m>",
    "api": "chat",
    "stream": True,
    "prompt_tokens": "256",
    "output_tokens": "16",
    "dataset": None,
}


def result(loads: int = 2, *, stream: bool = True) -> Result:
    runs = []
    for users in range(1, loads + 1):
        tally = Tally(100.0, {"e2e": 0.5})
        records = [answered(n / 10, users, stream=stream) for n in range(50)]
        records.append(Record("http", 100.0, 101.0, status=429, message="the queue is full"))
        gaps = {bucket_of(0.01 * users): 200} if stream else {}
        tally.report(0, Report(records, gaps, 51, 0, 250))
        tally.add_end(Ended(106.0, 0.95, {}, {}, 0))
        machine = Machine(0.3, 8, has_server=False)
        runs.append(
            tally.make_result(concurrency=users, rate=None, interrupted=False, machine=machine)
        )
    return Result(VERSION, "0.0", "2026-01-01T00:00:00+00:00", "http://a:1/v1", ASKED, runs)


def answered(at: float, users: int, *, stream: bool) -> Record:
    began, ended = 100.0 + at, 100.0 + at + 0.2 * users
    if not stream:
        return Record("ok", began, ended, prompt_tokens=256, output_tokens=16)
    return Record("ok", began, ended, began + 0.05, ended, 5, 5, 0.02, 256, 16)
