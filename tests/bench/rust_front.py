"""servekit beside vllm-rs, vLLM's front end in Rust: the same tokenizer, tokens and pace, by turns.

    pip install pyzmq
    pip download --no-deps vllm==0.26.0 && unzip -j vllm-*.whl vllm/vllm-rs && chmod +x vllm-rs
    python -m tests.bench.rust_front --vllm-rs ./vllm-rs [--rounds 5] [--only tokens requests]

Neither has a model. servekit's worker runs the engine `tests.bench.paced`, and vllm-rs has
`tests.bench.rust_core` for an engine core: each stream gets a token every 10 ms, and a request for
one token is answered at once. SmolLM2's tokenizer, which a start of configs/demo.yaml has left in
the cache. CPU is servekit's supervisor, gateway and worker without the engine's own steps, and
vllm-rs without its engine core. `bare` only writes. No prompt comes twice, unless it says so.

--wrk       a binary of wrk, to ask for requests, too
--guidellm  the command of a guidellm, to ask for streams, too
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tests.bench import crowd
from tests.bench.cpu import await_calm, cpu_s, read_own_s
from tests.bench.figures import conditions
from tests.bench.load import Order, Result, Unexpected, run, together
from tests.bench.paced import MARK, OWN, copy_model, installed, model_entry, read_words
from tests.bench.peers import await_answer, started
from tests.bench.table import spread
from tests.bench.transformers_serve import cached_model
from tests.integration.instance import DIE_WITH_TESTS, Instance

OURS, THEIRS, BARE = "servekit", "vllm-rs", "bare"
COMPLETION, CHAT = "completion", "chat"
PATHS = {COMPLETION: "/v1/completions", CHAT: "/v1/chat/completions"}
PROMPT = 140  # tokens
#: Tokens of long chats without those of the template.
LONG = (5365, 8000, 16000, 32000)
LONG_TEXTS = 64
TEMPLATE = 31
CONNECTIONS = 64
VARIED = 512
#: It stands for the number of a request.
NUMBER = "########"
#: guidellm's names of them.
GUIDELLM_TIMES = {"first token": "time_to_first_token_ms", "gap": "inter_token_latency_ms"}
KINDS = ("requests", "varied", "long", "first", "wrk", "guidellm", "tokens", "idle")


@dataclass(frozen=True, slots=True)
class Server:
    """One contestant: its port, the processes that count, and those that are told beside."""

    port: int
    front: tuple[int, ...]
    core: tuple[int, ...] = ()
    own: Path | None = None  # where CPU time is told that is the engine's; see `read_own_s`

    def front_s(self) -> float:
        """CPU time of the front end so far, in seconds."""
        return sum(map(cpu_s, self.front)) - (read_own_s(self.own) if self.own else 0.0)


# ---------------------------------------------------------------- the servers


@contextlib.contextmanager
def servers(
    folder: Path, source: Path, binary: Path | None, python: str, gateways: Sequence[int] = (1,)
) -> Iterator[dict[str, Server]]:
    """Start all of them; without the binary all but vllm-rs."""
    model = copy_model(source, folder / "model")
    with contextlib.ExitStack() as stack:
        found = {
            OURS if count == 1 else f"{OURS}, {count} gateways": stack.enter_context(
                _ours(folder / f"ours-{count}", source, count)
            )
            for count in gateways
        }
        if binary is not None:
            found[THEIRS] = stack.enter_context(_theirs(folder, model, binary.resolve(), python))
        found[BARE] = stack.enter_context(_bare(folder))
        yield found


@contextlib.contextmanager
def _ours(home: Path, source: Path, gateways: int) -> Iterator[Server]:
    home.mkdir()
    model = copy_model(source, home / "model")
    env = installed(home / "site")
    server = {"gateways": gateways}
    with Instance.up(home, [model_entry("m", model)], server=server, env=env) as instance:
        status = instance.until_settled(within_s=120)
        (replica,) = status.models[0].replicas
        assert replica.state == "ready", replica
        proven = "tokenizer_library_used"  # the thread that proves it takes seconds of CPU time
        instance.until(proven, lambda: proven in instance.log)
        pids = (*(one.pid for one in status.gateways), replica.pid, status.pid)
        yield Server(urlsplit(status.url).port or 0, pids, own=model / OWN)


@contextlib.contextmanager
def _theirs(folder: Path, model: Path, binary: Path, python: str) -> Iterator[Server]:
    """As `RustFrontendProcessManager` of vllm/v1/utils.py starts it."""
    inputs, outputs = (f"ipc://{folder / name}" for name in ("in", "out"))
    settings = {"model_tag": str(model), "model": str(model), "served_model_name": ["m"]}
    core = (*DIE_WITH_TESTS, python, "-m", "tests.bench.rust_core", str(model), inputs, outputs)
    with (
        started(core, folder / "core.log") as engine,
        socket.create_server(("127.0.0.1", 0), backlog=4096) as listener,
    ):
        port = listener.getsockname()[1]
        command = [*DIE_WITH_TESTS, str(binary), "frontend"]
        command += ["--listen-fd", str(listener.fileno())]
        command += ["--input-address", inputs, "--output-address", outputs]
        command += ["--args-json", json.dumps(settings)]
        log = folder / "vllm-rs.log"
        with started(command, log, pass_fds=(listener.fileno(),)) as process:
            await_answer(process, f"http://127.0.0.1:{port}/health", log)
            yield Server(port, (process.pid,), (engine.pid,))


@contextlib.contextmanager
def _bare(folder: Path) -> Iterator[Server]:
    command = [*DIE_WITH_TESTS, sys.executable, "-m", "tests.bench.bare_write"]
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


class Texts:
    """Texts of so many tokens, of random words, each with a place for its number."""

    def __init__(self, words: Sequence[str]) -> None:
        self._source = random.Random(1)
        self._pool = self._source.choices(words, k=100_000)

    def make(self, count: int, tokens: int, *, numbered: bool = True) -> list[str]:
        places = [self._source.randrange(len(self._pool) - tokens) for _ in range(count)]
        begin = NUMBER if numbered else "00000000"
        size = tokens - len(begin)  # each digit is a token
        return [f"{begin} {' '.join(self._pool[at : at + size])}" for at in places]


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
        names = list(dict.fromkeys(name for row in self.rows.values() for name in row.values))
        ours = [name for name in names if name not in (THEIRS, BARE)]
        heads = [*names, *(f"{name}: ratio" for name in ours if THEIRS in names)]
        yield f"| what | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|"
        for row in self.rows.values():
            cells = [
                spread(row.values[name], 2, f" {row.unit}") if name in row.values else ""
                for name in names
            ]
            if THEIRS in names:
                cells += [ratio(row, name) for name in ours]
            yield f"| {row.name} | {' | '.join(cells)} |"


def ratio(row: Row, name: str) -> str:
    """The medians' ratio, that server's to vllm-rs's."""
    if name not in row.values or THEIRS not in row.values:
        return ""
    ours, theirs = (statistics.median(row.values[one]) for one in (name, THEIRS))
    return f"{ours / theirs:.2f}" if theirs else ""


class Contest:
    """All measurements, each of all servers by turns."""

    def __init__(self, found: dict[str, Server], model: Path, options: argparse.Namespace) -> None:
        self._found = found
        self._model = model
        self._texts = Texts(list(read_words(model)))
        self._options = options
        self._seconds: float = options.seconds
        self._calm: float = options.calm_within
        self.table = Table()
        self._add = self.table.add
        self.core_us: list[float] = []  # of each request, what vllm-rs's core took

    def run(self) -> None:
        self._warm()
        for number in range(self._options.rounds):
            for kind in self._options.only:
                if kind != "idle":
                    _say(f"round {number}: {kind}")
                    getattr(self, f"_{kind}")()
        if "idle" in self._options.only:
            _say(f"resting for {self._options.settle:g} s")
            time.sleep(self._options.settle)  # nothing tells that it rests
            for _ in range(self._options.rounds):
                self._idle()

    def _turns(self, *, bare: bool = False) -> Iterator[tuple[str, Server]]:
        for name, server in self._found.items():
            if bare or name != BARE:
                await_calm(self._calm)
                yield name, server

    def _warm(self) -> None:
        """Make caches and connections."""
        for _, server in self._turns():
            for kind in (COMPLETION, CHAT):
                bodies = [body(kind, text, 1) for text in self._texts.make(64, PROMPT)]
                self._ask(server, kind, bodies, CONNECTIONS)

    def _ask(
        self,
        server: Server,
        kind: str,
        bodies: Sequence[str],
        connections: int,
        heads: tuple[str, ...] = (),
        *,
        stream: bool = False,
    ) -> tuple[Result, float]:
        """Return what came, and the CPU time of the front end meanwhile, in seconds."""
        generators = min(self._options.generators, connections)
        order = Order(
            port=server.port,
            path=PATHS[kind],
            body="",
            connections=connections // generators,
            watch=(*server.front, *server.core),
            stream=stream,
            seconds=self._seconds,
            bodies=tuple(bodies),
            headers=heads,
            mark=MARK,
            number=NUMBER,
            own=str(server.own) if server.own else "",
        )
        # No prompt comes twice: each generator's numbers begin elsewhere.
        orders = [msgspec.structs.replace(order, first=at * 10_000_000) for at in range(generators)]
        with ThreadPoolExecutor(generators) as threads:
            one = together(list(threads.map(run, orders)))
        front_s = sum(one.cpu_s[: len(server.front)]) - one.own_s
        return one, front_s

    # ---- the measurements

    def _tokens(self) -> None:
        for streams in self._options.streams:
            bodies = [body(CHAT, one, 100_000, stream=True) for one in self._texts.make(64, PROMPT)]
            what = f"chat token, {streams:,} streams"
            for name, server in self._turns(bare=True):
                one, front_s = self._ask(server, CHAT, bodies, streams, stream=True)
                self._add(f"CPU of a {what}", "µs", name, 1e6 * front_s / max(1, one.tokens))
                if name != BARE:
                    self._add(f"… tokens/s, {streams:,} streams", "", name, one.tokens_per_s)
                if name != BARE and streams == 64:
                    self._add(f"bytes of a {what}", "B", name, one.received / max(1, one.tokens))

    def _requests(self) -> None:
        for kind in (COMPLETION, CHAT):
            bodies = [body(kind, one, 1) for one in self._texts.make(1, PROMPT, numbered=False)]
            self._short(kind, f"{kind}, always the same", bodies)

    def _varied(self) -> None:
        for kind in (COMPLETION, CHAT):
            bodies = [body(kind, one, 1) for one in self._texts.make(VARIED, PROMPT)]
            self._short(kind, f"{kind}, no text, key or head twice", bodies, headers(VARIED))

    def _long(self) -> None:
        for tokens in LONG:
            bodies = [body(CHAT, one, 1) for one in self._texts.make(LONG_TEXTS, tokens)]
            self._short(CHAT, f"chat of {tokens + TEMPLATE:,} tokens", bodies, connections=4)

    def _short(
        self,
        kind: str,
        what: str,
        bodies: Sequence[str],
        heads: tuple[str, ...] = (),
        connections: int = CONNECTIONS,
    ) -> None:
        for name, server in self._turns():
            one, front_s = self._ask(server, kind, bodies, connections, heads)
            self._add(f"CPU of a {what}", "µs", name, 1e6 * front_s / max(1, one.answers))
            self._add(f"… requests/s, {what}", "", name, one.answers_per_s)
            if server.core:
                core_s = sum(one.cpu_s[len(server.front) :])
                self.core_us.append(1e6 * core_s / max(1, one.answers))

    def _first(self) -> None:
        for streams in self._options.at_once:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            asked = self._texts.make(streams, PROMPT, numbered=False)
            bodies = [[body(CHAT, text, 8, **more)] for text in asked]
            for name, server in self._turns():
                order = crowd.Order(server.port, PATHS[CHAT], bodies, stream=True, mark=MARK)
                one = crowd.ask(order, self._options.generators)
                for share in (0.5, 0.99):
                    what = f"first token, p{100 * share:.0f}, {streams:,} chats at once"
                    self._add(what, "ms", name, 1e3 * one.first_s(share))

    def _idle(self) -> None:
        turns = list(self._turns())
        before = {name: server.front_s() for name, server in turns}
        time.sleep(self._options.idle)  # what is measured
        for name, server in turns:
            ms = 1e3 * (server.front_s() - before[name]) / self._options.idle
            self._add("CPU at rest", "ms/s", name, ms)

    def _wrk(self) -> None:
        if self._options.wrk is None:
            return
        for kind in (COMPLETION, CHAT):
            asked = self._texts.make(VARIED, PROMPT, numbered=False)
            bodies = [body(kind, text, 1) for text in asked]
            for name, server in self._turns():
                before = server.front_s()
                answers, rate = ask_with_wrk(
                    self._options.wrk, server.port, PATHS[kind], bodies, self._seconds
                )
                us = 1e6 * (server.front_s() - before) / max(1, answers)
                self._add(f"wrk: CPU of a {kind}, {VARIED} texts", "µs", name, us)
                self._add(f"… wrk: requests/s, {kind}", "", name, rate)

    def _guidellm(self) -> None:
        if self._options.guidellm is None:
            return
        for name, server in self._turns():
            before = server.front_s()
            metrics = ask_with_guidellm(self._options.guidellm, server.port, self._model)
            front_s = server.front_s() - before
            tokens = metrics["output_token_count"]["successful"]["total_sum"]
            self._add("guidellm: CPU of a chat token", "µs", name, 1e6 * front_s / tokens)
            rate = metrics["requests_per_second"]["successful"]["mean"]
            self._add("… guidellm: requests/s", "", name, rate)
            for what, key in GUIDELLM_TIMES.items():
                times = metrics[key]["successful"]["percentiles"]
                for share in ("p50", "p99"):
                    self._add(f"guidellm: {what}, {share}", "ms", name, times[share])


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


def ask_with_guidellm(command: str, port: int, model: Path) -> dict[str, Any]:
    """Return guidellm's metrics of streamed chats. Raises Unexpected unless all have succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = {
            "backend": f"kind=openai_http,target=http://127.0.0.1:{port},model=m",
            "tokenizer": f"kind=huggingface_auto,model={model}",
            "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens=64",
            "profile": f"kind=concurrent,streams={CONNECTIONS}",
            "constraint": f"kind=max_requests,count={5 * CONNECTIONS}",
            "output": f"kind=json,path={report}",
        }
        told = [word for name, value in options.items() for word in (f"--{name}", value)]
        asked = [command, "run", "--disable-console", *told]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise Unexpected(done.stdout[-2000:] + done.stderr[-2000:])
        metrics: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    if metrics["request_totals"]["successful"] < 5 * CONNECTIONS:
        raise Unexpected(str(metrics["request_totals"]))
    return metrics


def _check_peer(binary: Path, python: str) -> None:
    if not os.access(binary, os.X_OK):
        sys.exit(f"{binary} is no program; it is vllm/vllm-rs of vLLM's wheel (chmod +x)")
    if subprocess.run([python, "-c", "import zmq"], stderr=subprocess.DEVNULL).returncode:
        sys.exit(f"{python} has no pyzmq, which the engine core of vllm-rs needs")


def _say(text: str) -> None:
    print(f"{time.monotonic():.0f} s: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.rust_front", description=__doc__)
    parser.add_argument("--vllm-rs", type=Path, help="without it, servekit alone")
    parser.add_argument("--model", type=Path, help="a folder with another tokenizer")
    parser.add_argument("--python", default=sys.executable, help="one that has pyzmq")
    parser.add_argument("--hold", action="store_true", help="wait for another load generator")
    parser.add_argument("--wrk", type=Path, default=shutil.which("wrk"))
    parser.add_argument("--guidellm", default=shutil.which("guidellm"))
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 1000, 2000])
    parser.add_argument("--at-once", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1], help="in turns, too")
    parser.add_argument("--generators", type=int, default=1, help="processes that ask together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=100.0, help="seconds before the rest")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds of rest in each round")
    parser.add_argument("--calm-within", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    if options.vllm_rs is not None:
        _check_peer(options.vllm_rs, options.python)
    source = options.model or cached_model()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are ended, too
    with (
        tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder,
        servers(Path(folder), source, options.vllm_rs, options.python, options.gateways) as found,
    ):
        if options.hold:
            print(
                *(f"{name}: http://127.0.0.1:{one.port}" for name, one in found.items()), sep="\n"
            )
            sys.stdout.flush()
            signal.pause()
        contest = Contest(found, Path(folder) / "model", options)
        contest.run()
    print("\n".join(contest.table.lines()))
    print(f"\n{options.rounds} rounds of {options.seconds:g} s; {conditions()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
