"""servekit's gateways beside vLLM's front ends in Python and in Rust: one GPU, by turns.

    python -m tests.bench.front_ends --tokenizer FOLDER [--streams 1 32 128 512 1024]
    python -m tests.bench.front_ends --tokenizer FOLDER --servers python transformers --streams 128

`python` and `rust` are `vllm serve` with either front end, `one` and `two` servekit's vLLM engine
behind so many gateways, `transformers` servekit's transformers engine behind one. Each has an
engine of its own on the GPU, with the same model, share of memory and KV cache (and vLLM), and only
one has work at a time. Prompts are random token ids (of a chat: random letters). `--tokenizer` is a
folder with a real tokenizer, whose vocabulary the random model gets; the model has the shape of a
0.6B. CPU is that of all processes of a server but vLLM's engine core.

--echo  try the script itself, without a GPU: servekit with one and two gateways
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from transformers import AutoTokenizer

from tests.bench.cpu import cpu_s
from tests.bench.crowd import Round
from tests.bench.figures import conditions
from tests.bench.load import Unexpected
from tests.bench.vllm import (
    PATHS,
    START_S,
    Load,
    api_server,
    ask_server,
    await_health,
    model_entry,
    vocabulary,
)
from tests.gpu.adapters import write_middle
from tests.integration.instance import Instance

#: Of the GPU, for each of four.
SHARE = 0.22
#: Environment of `vllm serve`, and engine and gateways of servekit, by name of the server.
THEIRS: dict[str, dict[str, str]] = {"python": {}, "rust": {"VLLM_USE_RUST_FRONTEND": "1"}}
OURS = {"one": ("vllm", 1), "two": ("vllm", 2), "transformers": ("transformers", 1)}
SERVERS = {
    "python": "vllm serve",
    "rust": "vllm serve, Rust",
    "one": "servekit, 1 gateway",
    "two": "servekit, 2 gateways",
    "transformers": "servekit, transformers",
}
HEAD = (
    "streams",
    "API",
    "server",
    "tok/s",
    "of the best",
    "TTFT p50 / p99",
    "gap p99",
    "CPU µs/tok",
)


@dataclass(frozen=True, slots=True)
class Server:
    """A front end that serves."""

    port: int
    pid: int

    def front_cpu_s(self) -> float:
        """CPU time of its processes without the engine core's, in seconds."""
        root = psutil.Process(self.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            return sum(cpu_s(pid) for pid in _front_pids(root))
        return 0.0


def _front_pids(process: psutil.Process) -> Iterator[int]:
    """Yield the process and its descendants, engine cores and what these start left out."""
    if "EngineCore" in " ".join(process.cmdline()):
        return
    yield process.pid
    for child in process.children():
        yield from _front_pids(child)


@contextlib.contextmanager
def servers(names: Sequence[str], echo: bool, model: Path) -> Iterator[dict[str, Server]]:
    """Start all of them; when the first is ready, whose kernels vLLM keeps, the others at once."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="servekit-bench-")))
        starting: list[tuple[str, Callable[[], Server]]] = []
        found: dict[str, Server] = {}
        for name in names:
            _say(f"starting {SERVERS[name]}")
            home = folder / name
            home.mkdir()
            if name in THEIRS:
                awaits = _start_theirs(stack, model, home / "log", THEIRS[name])
            else:
                engine, gateways = OURS[name]
                entry = model_entry("echo" if echo else engine, model, SHARE)
                awaits = _start_ours(stack, home, entry, gateways)
            if not starting:
                found[SERVERS[name]] = awaits()
            starting.append((SERVERS[name], awaits))
        found |= {name: awaits() for name, awaits in starting[1:]}
        yield found


def _start_theirs(
    stack: contextlib.ExitStack, model: Path, log: Path, env: dict[str, str]
) -> Callable[[], Server]:
    port, pid = stack.enter_context(api_server(model, log, SHARE, env))

    def until_ready() -> Server:
        await_health(port, log)
        return Server(port, pid)

    return until_ready


def _start_ours(
    stack: contextlib.ExitStack, home: Path, entry: dict[str, Any], gateways: int
) -> Callable[[], Server]:
    instance = stack.enter_context(Instance.up(home, [entry], server={"gateways": gateways}))

    def until_ready() -> Server:
        status = instance.until_settled(within_s=START_S)
        states = [(one.state, one.reason) for one in status.models[0].replicas]
        assert all(state == "ready" for state, _ in states), states
        return Server(urlsplit(status.url).port or 0, instance.process.pid)

    return until_ready


def _say(text: str) -> None:
    print(f"{time.monotonic():.0f} s: {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Measured:
    """All rounds of one server, API and number of streams."""

    rounds: list[Round] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # for each token
    failed: str = ""  # why the last round that broke off did

    def middle(self, of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, self.rounds))

    @property
    def rate(self) -> float:
        """Median of the rounds; 0 if each broke off."""
        return self.middle(lambda one: one.tokens_per_s) if self.rounds else 0.0

    def cells(self, best: float) -> Iterator[str]:
        if not self.rounds:
            yield from (self.failed or "not asked", *[""] * 4)
            return
        yield f"{self.rate:,.0f}"
        yield f"{self.rate / best:.2f}"
        first = [self.middle(lambda one, at=at: one.first_s(at)) * 1e3 for at in (0.5, 0.99)]  # type: ignore[misc]
        yield f"{first[0]:,.0f} / {first[1]:,.0f} ms"
        yield f"{self.middle(lambda one: one.gap_s(0.99)) * 1e3:,.0f} ms"
        yield f"{statistics.median(self.cpu_us):.1f}"


Key = tuple[int, str, str]


def measure(
    found: dict[str, Server], load: Load, options: argparse.Namespace, until_s: float
) -> dict[Key, Measured]:
    """Ask all by turns, round after round, while there is time; one round at least."""
    keys = [(n, kind, name) for n in options.streams for kind in PATHS for name in found]
    results: dict[Key, Measured] = {key: Measured() for key in keys}
    turns = {
        (kind, name): ask_server(server.port, kind, load)
        for kind in PATHS
        for name, server in found.items()
    }
    for turn in turns.values():  # connections, caches and memory are made
        turn(min(32, max(options.streams)), -1)
    for number in range(options.rounds):
        for streams, kind, name in keys:
            result = results[streams, kind, name]
            if number and time.monotonic() > until_s:
                return results
            before_s = found[name].front_cpu_s()
            try:
                one = turns[kind, name](streams, number)
            except Unexpected as error:  # the others are to be seen all the same
                result.failed = str(error).strip().rpartition("\n")[2]
                _say(f"{number}: {streams} {kind} {name}: {result.failed}")
                continue
            result.rounds.append(one)
            result.cpu_us.append((found[name].front_cpu_s() - before_s) / one.tokens * 1e6)
            _say(f"{number}: {streams} {kind} {name}: {one.tokens_per_s:,.0f} tok/s")
    return results


def table(results: dict[Key, Measured]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}"
    for (streams, kind, name), one in results.items():
        best = max(r.rate for (n, k, _), r in results.items() if (n, k) == (streams, kind))
        yield f"| {streams} | {kind} | {name} | {' | '.join(one.cells(best))} |"


def main(arguments: Sequence[str] | None = None) -> int:
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.bench.front_ends", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a folder; by default one of bytes")
    parser.add_argument("--servers", choices=SERVERS, nargs="+", default=list(SERVERS)[:4])
    parser.add_argument("--echo", action="store_true", help="try this script without a GPU")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128, 512, 1024])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="at most")
    parser.add_argument("--clients", type=int, default=4, help="processes that ask")
    parser.add_argument("--within", type=float, default=480.0, help="seconds; at least one round")
    options = parser.parse_args(arguments)
    names = [name for name in options.servers if not (options.echo and name in THEIRS)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are ended, too
    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "m"
        if not options.echo:
            tokenizer = options.tokenizer and AutoTokenizer.from_pretrained(options.tokenizer)
            write_middle(model, tokenizer)
        vocab = vocabulary(None if options.echo else model)
        load = Load(options.prompt, options.output, 1, vocab, options.clients)
        found = stack.enter_context(servers(names, options.echo, model))
        _say(f"ready after {time.monotonic() - began_s:.0f} s")
        results = measure(found, load, options, began_s + options.within)
    rounds = [len(one.rounds) for one in results.values()]
    print("\n".join(table(results)))
    print(
        f"\nvocabulary {vocab:,}, {options.prompt} tokens in, {options.output} out, "
        f"{min(rounds)} to {max(rounds)} rounds, {options.clients} client processes; {conditions()}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
