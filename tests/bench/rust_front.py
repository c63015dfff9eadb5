"""servekit beside vllm-rs, vLLM's front end in Rust: the same tokenizer, tokens and pace, by turns.

    pip install pyzmq
    pip download --no-deps vllm==0.26.0 && unzip -j vllm-*.whl vllm/vllm-rs
    python -m tests.bench.rust_front --vllm-rs ./vllm-rs [--rounds 5] [--only tokens requests]

Neither has a model. servekit's worker runs the engine `tests.bench.paced`, and vllm-rs has
`tests.bench.rust_core` for an engine core: each stream gets a token every 10 ms, and a request for
one token is answered at once. SmolLM2's tokenizer, which a start of configs/demo.yaml has left in
the cache. CPU is servekit's supervisor, gateway and worker, the step of the engine included, and
vllm-rs without its engine core, whose part is told by itself. `bare` only writes.

--wrk  a binary of wrk, to ask for requests, too
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.bench import crowd
from tests.bench.cpu import await_calm, cpu_s
from tests.bench.figures import conditions
from tests.bench.load import Order, Result, Unexpected, run
from tests.bench.paced import MARK, copy_model, installed, model_entry
from tests.bench.peers import await_answer, started
from tests.bench.table import spread
from tests.bench.tokenising import make_text
from tests.bench.transformers_serve import cached_model
from tests.integration.instance import Instance

OURS, THEIRS, BARE = "servekit", "vllm-rs", "bare"
COMPLETION, CHAT = "completion", "chat"
PATHS = {COMPLETION: "/v1/completions", CHAT: "/v1/chat/completions"}
PROMPT = 140  # tokens
#: Words of chats: of 5,396 tokens with the template's, and of 8k, 16k and 32k.
LONG = (5365, 8192, 16384, 32000)
CONNECTIONS = 64
VARIED = 512
KINDS = ("tokens", "requests", "varied", "long", "first", "idle", "wrk")


@dataclass(frozen=True, slots=True)
class Server:
    """One contestant: its port, the processes that count, and those that are told beside."""

    port: int
    front: tuple[int, ...]
    beside: tuple[int, ...] = ()


# ---------------------------------------------------------------- the servers


@contextlib.contextmanager
def servers(folder: Path, binary: Path | None, python: str) -> Iterator[dict[str, Server]]:
    """Start all of them; without the binary all but vllm-rs."""
    model = copy_model(cached_model(), folder / "model")
    with contextlib.ExitStack() as stack:
        found = {OURS: stack.enter_context(_ours(folder, model))}
        if binary is not None:
            found[THEIRS] = stack.enter_context(_theirs(folder, model, binary.resolve(), python))
        found[BARE] = stack.enter_context(_bare(folder))
        yield found


@contextlib.contextmanager
def _ours(folder: Path, model: Path) -> Iterator[Server]:
    home = folder / "ours"
    home.mkdir()
    env = installed(folder / "site")
    with Instance.up(home, [model_entry("m", model)], env=env) as instance:
        status = instance.until_settled(within_s=120)
        (replica,) = status.models[0].replicas
        assert replica.state == "ready", replica
        pids = (status.gateways[0].pid, replica.pid, status.pid)
        yield Server(urlsplit(status.url).port or 0, pids)


@contextlib.contextmanager
def _theirs(folder: Path, model: Path, binary: Path, python: str) -> Iterator[Server]:
    """As `RustFrontendProcessManager` of vllm/v1/utils.py starts it."""
    inputs, outputs = (f"ipc://{folder / name}" for name in ("in", "out"))
    settings = {"model_tag": str(model), "model": str(model), "served_model_name": ["m"]}
    core = (python, "-m", "tests.bench.rust_core", str(model), inputs, outputs)
    with (
        started(core, folder / "core.log") as engine,
        socket.create_server(("127.0.0.1", 0), backlog=4096) as listener,
    ):
        port = listener.getsockname()[1]
        command = (str(binary), "frontend", "--listen-fd", str(listener.fileno()))
        command += ("--input-address", inputs, "--output-address", outputs)
        command += ("--args-json", json.dumps(settings))
        log = folder / "vllm-rs.log"
        with started(command, log, pass_fds=(listener.fileno(),)) as process:
            await_answer(process, f"http://127.0.0.1:{port}/health", log)
            yield Server(port, (process.pid,), (engine.pid,))


@contextlib.contextmanager
def _bare(folder: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.bench.bare_write"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(int(process.stdout.readline()), (process.pid,))
        finally:
            process.kill()


# ---------------------------------------------------------------- what is asked


def body(kind: str, text: str, tokens: int, **more: Any) -> str:
    asked: dict[str, Any] = {"model": "m", "max_tokens": tokens, **more}
    if kind == COMPLETION:
        return json.dumps(asked | {"prompt": text})
    return json.dumps(asked | {"messages": [{"role": "user", "content": text}]})


def texts(count: int, words: int, seed: int = 1) -> list[str]:
    """Texts of about so many tokens, all unlike."""
    source = random.Random(seed)
    return [make_text(words, source) for _ in range(count)]


def headers(count: int) -> tuple[str, ...]:
    """Of as many users: a key, a user agent and a request's name each."""
    return tuple(
        f"authorization: Bearer sk-{at:032x}\r\nuser-agent: client/{at % 7}.{at}\r\n"
        f"x-request-id: {at:08x}-{at * 7919:08x}\r\n"
        for at in range(count)
    )


# ---------------------------------------------------------------- one measurement each


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured of each server, and whether more is better."""

    name: str
    unit: str
    #: By server, one value for each round.
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, server: str, value: float) -> None:
        self.values.setdefault(server, []).append(value)


@dataclass(slots=True)
class Table:
    """The rows in the order of their first values."""

    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, name: str, unit: str, server: str, value: float) -> None:
        self.rows.setdefault(name, Row(name, unit)).add(server, value)

    def lines(self) -> Iterator[str]:
        yield "| what | servekit | vllm-rs | ratio | bare write |\n|---|---|---|---|---|"
        for row in self.rows.values():
            cells = [
                spread(row.values[name], 2, f" {row.unit}") if name in row.values else ""
                for name in (OURS, THEIRS, BARE)
            ]
            yield f"| {row.name} | {cells[0]} | {cells[1]} | {ratio(row)} | {cells[2]} |"


def ratio(row: Row) -> str:
    """The medians' ratio, ours to theirs."""
    if OURS not in row.values or THEIRS not in row.values:
        return ""
    ours, theirs = (statistics.median(row.values[name]) for name in (OURS, THEIRS))
    return f"{ours / theirs:.2f}" if theirs else ""


class Contest:
    """All measurements, each of all servers by turns."""

    def __init__(self, found: dict[str, Server], options: argparse.Namespace) -> None:
        self._found = found
        self._options = options
        self._seconds: float = options.seconds
        self._calm: float = options.calm_within
        self.table = Table()

    def run(self) -> None:
        self._warm()
        for number in range(self._options.rounds):
            for kind in self._options.only:
                _say(f"round {number}: {kind}")
                getattr(self, f"_{kind}")(number)

    def _turns(self, *, bare: bool = False) -> Iterator[tuple[str, Server]]:
        for name, server in self._found.items():
            if bare or name != BARE:
                await_calm(self._calm)
                yield name, server

    def _warm(self) -> None:
        """Make caches and connections."""
        for name, server in self._turns():
            for kind in (COMPLETION, CHAT):
                bodies = tuple(body(kind, text, 1) for text in texts(64, PROMPT))
                self._ask(name, server, kind, bodies, CONNECTIONS)

    def _ask(self, name: str, server: Server, kind: str, bodies: Sequence[str], connections: int,
             stream: bool = False, heads: tuple[str, ...] = ()) -> Result:
        watch = (*server.front, *server.beside)
        return run(
            Order(
                server.port, PATHS[kind], "", connections, watch, stream, self._seconds,
                min(0.5, self._seconds), tuple(bodies), heads, MARK,
            )
        )

    def _front_us(self, server: Server, result: Result, count: int) -> float:
        return 1e6 * sum(result.cpu_s[: len(server.front)]) / max(1, count)

    # ---- the measurements

    def _tokens(self, number: int) -> None:
        for streams in self._options.streams:
            bodies = [body(CHAT, text, 100_000, stream=True) for text in texts(64, PROMPT, number)]
            for name, server in self._turns(bare=True):
                one = self._ask(name, server, CHAT, bodies, streams, stream=True)
                add, what = self.table.add, f"a token of {streams} chats"
                add(f"CPU, {what}", "µs", name, self._front_us(server, one, one.tokens))
                if streams == 64 and name != BARE:
                    add("bytes of a chat's token", "B", name, one.received / max(1, one.tokens))
                add(f"tokens/s, {streams} chats", "/s", name, one.tokens_per_s)
                self._tell_beside(f"of the core, {what}", name, server, one, one.tokens)

    def _requests(self, number: int) -> None:
        for kind in (COMPLETION, CHAT):
            bodies = [body(kind, texts(1, PROMPT)[0], 1)]
            self._short(kind, f"{kind}s, one and the same", bodies)

    def _varied(self, number: int) -> None:
        for kind in (COMPLETION, CHAT):
            bodies = [body(kind, text, 1) for text in texts(VARIED, PROMPT, number)]
            self._short(kind, f"{kind}s, varied texts, headers and keys", bodies, headers(VARIED))

    def _long(self, number: int) -> None:
        for words in LONG:
            bodies = [body(CHAT, text, 1) for text in texts(16, words, number)]
            self._short(CHAT, f"chats of {words:,} words", bodies, connections=4)

    def _short(self, kind: str, what: str, bodies: Sequence[str], heads: tuple[str, ...] = (),
               connections: int = CONNECTIONS) -> None:
        for name, server in self._turns():
            one = self._ask(name, server, kind, bodies, connections, heads=heads)
            add = self.table.add
            add(f"CPU, {what}", "µs", name, self._front_us(server, one, one.answers))
            add(f"requests/s, {what}", "/s", name, one.answers_per_s)
            self._tell_beside(f"of the core, {what}", name, server, one, one.answers)

    def _tell_beside(self, what: str, name: str, server: Server, one: Result, count: int) -> None:
        if server.beside:
            us = 1e6 * sum(one.cpu_s[len(server.front) :]) / max(1, count)
            self.table.add(f"CPU {what}", "µs", f"{name}'s core", us)

    def _first(self, number: int) -> None:
        for streams in self._options.at_once:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            bodies = [[body(CHAT, text, 8, **more)] for text in texts(streams, PROMPT, number)]
            for name, server in self._turns():
                one = crowd.ask(crowd.Order(server.port, PATHS[CHAT], bodies, stream=True), 1)
                for fraction in (0.5, 0.99):
                    what = f"first event, p{100 * fraction:.0f}, {streams} chats at once"
                    self.table.add(what, "ms", name, 1e3 * one.first_s(fraction))

    def _idle(self, number: int) -> None:
        turns = list(self._turns())
        before = {name: sum(map(cpu_s, server.front)) for name, server in turns}
        time.sleep(self._options.idle)  # what is measured
        for name, server in turns:
            ms = 1e3 * (sum(map(cpu_s, server.front)) - before[name]) / self._options.idle
            self.table.add("CPU at rest", "ms/s", name, ms)

    def _wrk(self, number: int) -> None:
        if self._options.wrk is None:
            return
        for kind in (COMPLETION, CHAT):
            bodies = [body(kind, text, 1) for text in texts(VARIED, PROMPT, number)]
            for name, server in self._turns():
                before = sum(map(cpu_s, server.front))
                answers, rate = ask_with_wrk(
                    self._options.wrk, server.port, PATHS[kind], bodies, self._seconds
                )
                us = 1e6 * (sum(map(cpu_s, server.front)) - before) / max(1, answers)
                self.table.add(f"wrk: CPU, {kind}s, varied texts", "µs", name, us)
                self.table.add(f"wrk: requests/s, {kind}s, varied texts", "/s", name, rate)


_WRK = """
local bodies = {}
for line in io.lines(os.getenv("BODIES")) do bodies[#bodies + 1] = line end
local at = 0
request = function()
    at = at % #bodies + 1
    return wrk.format("POST", nil, {["content-type"] = "application/json"}, bodies[at])
end
done = function(summary)
    local bad = summary.errors.status + summary.errors.read + summary.errors.timeout
    io.write(string.format("FOUND %d %d %d\\n", summary.requests, summary.duration, bad))
end
"""


def ask_with_wrk(
    wrk: Path, port: int, path: str, bodies: Sequence[str], seconds: float
) -> tuple[int, float]:
    """Return the number of answers and their rate. Raises Unexpected if one is no 2xx."""
    with tempfile.TemporaryDirectory() as folder:
        script, lines = Path(folder, "ask.lua"), Path(folder, "bodies")
        script.write_text(_WRK)
        lines.write_text("\n".join(bodies))
        command = [str(wrk), "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s"]
        command += ["-s", str(script), f"http://127.0.0.1:{port}{path}"]
        env = {**os.environ, "BODIES": str(lines)}
        told = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=120, check=True
        ).stdout
    found = re.search(r"FOUND (\d+) (\d+) (\d+)", told)
    if found is None or int(found[3]):
        raise Unexpected(told)
    return int(found[1]), int(found[1]) / (int(found[2]) / 1e6)


def _say(text: str) -> None:
    print(f"{time.monotonic():.0f} s: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.rust_front", description=__doc__)
    parser.add_argument("--vllm-rs", type=Path, help="without it, servekit alone")
    parser.add_argument("--python", default=sys.executable, help="one that has pyzmq")
    parser.add_argument("--wrk", type=Path, default=shutil.which("wrk"))
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 1000, 2000])
    parser.add_argument("--at-once", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds of rest in each round")
    parser.add_argument("--calm-within", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are ended, too
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        with servers(Path(folder), options.vllm_rs, options.python) as found:
            contest = Contest(found, options)
            contest.run()
    print("\n".join(contest.table.lines()))
    print(f"\n{options.rounds} rounds of {options.seconds:g} s; {conditions()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
