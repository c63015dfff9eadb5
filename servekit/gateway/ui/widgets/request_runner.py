"""The requests of a page under way: opened as over HTTP, shown in snapshots, ended with the page.

This module is independent of Gradio. A request is the very body that a client would send, so the
page runs exactly what it shows as `curl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from servekit.errors import ClientClosed, RequestError
from servekit.gateway.api.endpoint import open_completed
from servekit.gateway.api.openai.generation_request import chat_request, completion_request
from servekit.gateway.api.openai.request import completion_prompts
from servekit.gateway.api.openai.schema import ChatRequest, CompletionRequest, decode
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.generation.generation import (
    Choice,
    Generation,
    GenerationChunk,
    GenerationRequest,
)
from servekit.gateway.http.request_context import ORIGIN, RequestContext
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.router import Router
from servekit.gateway.telemetry.request_recorder import RECORDER
from servekit.protocol.types import FinishReason

Told = TypeVar("Told")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
#: Time between two updates of one page, s. Each answer under way adds its share, which bounds the
#: updates of all pages together to about a hundred per second.
UPDATE_S = 0.08
UPDATE_PER_ANSWER_S = 0.01
#: The characters shown between two updates of normal length; longer answers update less often.
CHARS_PER_UPDATE = 20_000


@dataclass(frozen=True, slots=True)
class Visit:
    """The visitor of a page: browser session, address, and the authorization header if any."""

    session: str
    client: str
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an answer. Times are in seconds."""

    waiting: int | None = None  # requests ahead in the queue; None once it runs
    tokens: int = 0
    first_s: float | None = None  # from the question to the first token
    rate: float | None = None  # tokens per second after the first
    finish: FinishReason | None = None
    route: ModelQueue | None = None  # of the request, while it waits


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request as a client would send it: a path, and its JSON body."""

    path: str
    body: Mapping[str, Any]

    def make_request(self, key: str) -> GenerationRequest:
        """Return the streamed generation request. Raises RequestError for a wrong body."""
        body = msgspec.json.encode({**self.body, "stream": True})
        if self.path == CHAT:
            return chat_request(decode(ChatRequest, body), key)
        request = decode(CompletionRequest, body)
        return completion_request(request, completion_prompts(request), key)


@dataclass(frozen=True, slots=True)
class Shown:
    """A snapshot of a run. `error` is a sentence if the run has failed."""

    choice: Choice
    progress: Progress
    error: str = ""
    busy: bool = True


class Runs:
    """The runs under way, one for each slot of each browser session."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._runs: dict[tuple[str, str], Run] = {}

    async def stream_run(
        self, visit: Visit, options: RequestOptions, slot: str = ""
    ) -> AsyncGenerator[Shown, None]:
        """Run a request and yield snapshots; the last one is not `busy`.

        Cancels the request if it is stopped, dropped, followed by another in its slot, or closed
        because the browser has disconnected.
        """
        self.drop_runs(visit.session, slot)
        run = self._runs[visit.session, slot] = Run()
        try:
            yield run.shown()
            opening = await self._open(run, visit, options)
            while not (await asyncio.wait([opening], timeout=self._interval_s(run)))[0]:
                yield run.shown(0)  # a model that has never been loaded is loaded for it
            run.turn = turn = opening.result()
            async with aclosing(self._follow(run, turn)) as places:
                async for place in places:
                    if run.dropped:
                        return
                    yield run.shown(place)
            yield run.last()
        except RequestError as error:
            run.status = error.status
            if not run.dropped:
                yield run.last("" if run.stopped else error.message)
        except asyncio.CancelledError:
            if not run.stopped:
                raise
            yield run.last()
        finally:
            run.cancel()
            if run.stopped or not (run.finished or run.status):
                run.status = ClientClosed.status
            RECORDER.note_request(options.path, run.status or 200, run.origin)
            if self._runs.get((visit.session, slot)) is run:
                del self._runs[visit.session, slot]

    def stop_runs(self, session: str) -> None:
        """End all of a session's runs, and keep their text so far."""
        for (whose, _), run in list(self._runs.items()):
            if whose == session:
                run.stopped = True
                run.cancel()

    def drop_runs(self, session: str, slot: str | None = None) -> None:
        """End a session's runs, or the one in `slot`, and show no more of them."""
        for whose, at in list(self._runs):
            if whose == session and slot in (None, at):
                run = self._runs.pop((whose, at))
                run.stopped = run.dropped = True
                run.cancel()

    async def _open(
        self, run: Run, visit: Visit, options: RequestOptions
    ) -> asyncio.Future[Generation]:
        """Return the generation, which may have to wait for its model."""
        caller = await self._router.access.charge_page_visitor(visit.authorization)
        run.origin.key = caller.rule.name if caller else ""
        ask = options.make_request(visit.client)
        run.route = self._router.find(ask.model) if self._router.serves(ask.model) else None
        before = ACTING.set(caller), ORIGIN.set(run.origin)
        try:
            run.opening = asyncio.ensure_future(open_completed(self._router, ask))
        finally:
            ACTING.reset(before[0])
            ORIGIN.reset(before[1])
        return run.opening

    async def _follow(self, run: Run, turn: Generation) -> AsyncGenerator[int | None, None]:
        """Collect an answer, and yield its place in the queue after each interval with news.

        While it waits, each interval has news: its place, or the progress of its model's load.
        """
        pieces = aiter(turn)
        coming = asyncio.ensure_future(anext(pieces))
        try:
            while True:
                waits = turn.first.replica is None and not turn.first.done
                interval_s = self._interval_s(run)
                done, _ = await asyncio.wait([coming], timeout=interval_s if waits else None)
                if not done:
                    yield self._router.position(turn.first)
                    continue
                run.add_chunks(turn, coming.result())
                if run.finished:
                    return
                yield None
                await asyncio.sleep(interval_s)  # let more tokens arrive
                coming = asyncio.ensure_future(anext(pieces))
        finally:
            coming.cancel()
            await asyncio.wait([coming])

    def _interval_s(self, run: Run) -> float:
        weight = 1 + len(run.choice.text) / CHARS_PER_UPDATE
        return (UPDATE_S + UPDATE_PER_ANSWER_S * len(self._runs)) * weight


async def merge_streams(
    streams: Mapping[str, AsyncGenerator[Told, None]],
) -> AsyncGenerator[tuple[str, Told], None]:
    """Yield the items of several streams as they arrive, with the name of each stream.

    Closes the streams when left early.
    """
    coming = {asyncio.ensure_future(anext(one)): name for name, one in streams.items()}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                name = coming.pop(task)
                with contextlib.suppress(StopAsyncIteration):
                    told = task.result()
                    coming[asyncio.ensure_future(anext(streams[name]))] = name
                    yield name, told
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


class Run:
    """A request, its result so far, and its times."""

    def __init__(self) -> None:
        self.choice = Choice()
        self.opening: asyncio.Future[Generation] | None = None
        self.turn: Generation | None = None
        self.route: ModelQueue | None = None
        self.stopped = self.dropped = self.finished = False
        self.origin = RequestContext({})
        self.status = 0  # for the request log; 0: not known yet
        self._asked_s = time.monotonic()
        self._first_s: float | None = None
        self._first_tokens = 0
        self._tokens = 0

    def cancel(self) -> None:
        if self.opening is not None:
            self.opening.cancel()
        if self.turn is not None:
            self.turn.cancel()

    def add_chunks(self, turn: Generation, pieces: list[GenerationChunk]) -> None:
        for piece in pieces:
            self.choice.add(piece)
            self.finished = self.finished or piece.finish is not None
        self._tokens = turn.completion_tokens or len(turn.first.emitted)
        if self._first_s is None and self._tokens:
            self._first_s, self._first_tokens = time.monotonic(), self._tokens

    def shown(self, place: int | None = None) -> Shown:
        if place is not None:
            return Shown(self.choice, Progress(waiting=place, route=self.route))
        return Shown(self.choice, self._progress())

    def last(self, error: str = "") -> Shown:
        return Shown(self.choice, self._progress(), error, busy=False)

    def _progress(self) -> Progress:
        finish: FinishReason | None = "cancelled" if self.stopped else None
        if self.finished and not self.stopped:
            finish = "length" if self.choice.finish == "length" else "stop"
        return Progress(None, self._tokens, self._to_first_s(), self._rate(), finish)

    def _to_first_s(self) -> float | None:
        return None if self._first_s is None else self._first_s - self._asked_s

    def _rate(self) -> float | None:
        if self._first_s is None:
            return None
        later, running_s = self._tokens - self._first_tokens, time.monotonic() - self._first_s
        return later / running_s if later > 0 and running_s > 0 else None
