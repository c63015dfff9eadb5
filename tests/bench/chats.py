"""Servers under the same chats, by turns: streamed, greedy, counted in the model's own tokens.

Each client asks its next question when it has its answer. No question comes twice, and every server
gets the same ones. A prefix cache may have what the chat template puts before a question; where
chats are marked it has nothing. A server may be stopped while another has its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.bench.contest import Plan
from tests.bench.cpu import await_calm
from tests.bench.table import spread

LIMIT_S = 300.0
#: Questions of one client in a round: a client alone need not ask as many as several do.
MOST_TURNS = 6
THINGS = ("a lighthouse", "a clockmaker", "the first snow", "an old bridge", "two rivers", "a fox")


@dataclass(frozen=True, slots=True)
class Server:
    """One contestant; `turn` is entered while it is measured."""

    name: str
    url: str
    body: dict[str, Any]
    turn: Callable[[], AbstractContextManager[None]]


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

    def __init__(
        self, servers: Sequence[Server], model: Path, questions: int, *, marked: bool = False
    ) -> None:
        """`questions` of a round, shared by its clients: each asks one at least, MOST_TURNS at
        most. `marked`: chats differ from the first word on."""
        from tokenizers import Tokenizer

        self._servers = servers
        self._questions = questions
        self._marked = marked
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
        """A round that does not count: the first requests compile and allocate."""
        for server in self._servers:
            with server.turn():
                self._measure(server, self._questions, -1)

    def _measure(self, server: Server, clients: int, at: int) -> Round:
        answers, wall_s = asyncio.run(self._crowd(server, clients, at))
        encoded = [self._tokenizer.encode(a.text, add_special_tokens=False) for a in answers]
        tokens = sum(len(one.ids) for one in encoded)
        first_s = statistics.median(answer.first_s for answer in answers)
        return Round(tokens / wall_s, first_s, tuple(answer.text for answer in answers))

    async def _crowd(self, server: Server, clients: int, at: int) -> tuple[list[Answer], float]:
        """All answers, and how long they took together; making the client is not counted."""
        # A connection each: one that is kept may be ended while a request is on its way.
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
        turns = min(MOST_TURNS, max(1, self._questions // clients))
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as http:

            async def one(client: int) -> list[Answer]:
                asked = [f"{clients}.{at}.{client}.{turn}" for turn in range(turns)]
                return [await _ask(http, server, chat(which, self._marked)) for which in asked]

            began = time.perf_counter()
            several = await asyncio.gather(*(one(client) for client in range(clients)))
            wall_s = time.perf_counter() - began
        return [answer for answers in several for answer in answers], wall_s


def chat(which: str, marked: bool) -> list[dict[str, str]]:
    """The messages of a question."""
    thing = THINGS[sum(map(ord, which)) % len(THINGS)]
    question = {"role": "user", "content": f"Tell story number {which}, a long one, about {thing}."}
    mark = {"role": "system", "content": f"{which} is the number of the story to tell."}
    return [mark, question] if marked else [question]


async def _ask(
    http: httpx.AsyncClient, server: Server, messages: Sequence[Mapping[str, str]]
) -> Answer:
    ask = {**server.body, "messages": messages}
    began, first_s, text, whole = time.perf_counter(), 0.0, "", False
    async with http.stream("POST", "/v1/chat/completions", json=ask) as answer:
        answer.raise_for_status()
        with contextlib.suppress(httpx.RemoteProtocolError):  # it is cut off
            async for line in answer.aiter_lines():
                piece, last = _content(line)
                first_s = first_s or (time.perf_counter() - began if piece else 0.0)
                text, whole = text + piece, whole or last
    return Answer(text if whole else "", first_s)


def _content(line: str) -> tuple[str, bool]:
    """The text of an event, and whether it is the last that has any."""
    if not line.startswith("data: {"):
        return "", False
    (choice, *_) = json.loads(line[6:]).get("choices") or [{}]
    return choice.get("delta", {}).get("content") or "", bool(choice.get("finish_reason"))


# ---------------------------------------------------------------- what the rounds say


def rate(several: Sequence[Round]) -> float:
    return statistics.median(one.tokens_per_s for one in several)


def rates(several: Sequence[Round]) -> str:
    return spread([one.tokens_per_s for one in several], 1)


def ratios(ours: Sequence[Round], theirs: Sequence[Round]) -> str:
    pairs = zip(ours, theirs, strict=True)
    return spread([a.tokens_per_s / b.tokens_per_s for a, b in pairs])


def first(several: Sequence[Round]) -> str:
    return spread([one.first_s for one in several], 2, " s")


def same(ours: Sequence[Round], theirs: Sequence[Round]) -> str:
    pairs = [
        a.strip() == b.strip()
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x.texts, y.texts, strict=True)
    ]
    return f"{sum(pairs)} of {len(pairs)} answers the same text"
