"""The requests of a page under way: opened as over HTTP, shown in snapshots, ended with the page.

This module is independent of Gradio. A request is the very body that a client would send, so the
page runs exactly what it shows as `curl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from servekit.errors import RequestError
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
from servekit.gateway.routing.router import Router
from servekit.gateway.ui.chat_session import UPDATE_PER_ANSWER_S, UPDATE_S, Progress, Visit
from servekit.protocol.types import FinishReason

Told = TypeVar("Told")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
#: The characters shown between two updates of normal length; longer answers update less often.
CHARS_PER_UPDATE = 20_000


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request as a client would send it: a path, and its JSON body."""

    path: str
    body: Mapping[str, Any]

    def make_request(self, key: str) -> GenerationRequest:
        """Return the streamed generation request. Raises RequestError for a wrong body."""
        streamed = {"stream": True, "stream_options": {"queue_position": True}}
        body = msgspec.json.encode({**self.body, **streamed})
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
            turn = await self._opened(run, visit, options)
            async for pieces in turn:
                run.add_chunks(turn, pieces)
                if run.finished:
                    break
                yield run.shown(turn.place)
                await asyncio.sleep(self._interval_s(run))  # let more tokens arrive
            yield run.last()
        except RequestError as error:
            if not run.dropped:
                yield run.last("" if run.stopped else error.message)
        except asyncio.CancelledError:
            if not run.stopped:
                raise
            yield run.last()
        finally:
            run.cancel()
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

    async def _opened(self, run: Run, visit: Visit, options: RequestOptions) -> Generation:
        caller = await self._router.access.charge_page_visitor(visit.authorization)
        ask = options.make_request(visit.client)
        before = ACTING.set(caller)
        try:
            run.opening = asyncio.ensure_future(open_completed(self._router, ask))
        finally:
            ACTING.reset(before)
        run.turn = await run.opening
        return run.turn

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
        self.stopped = self.dropped = self.finished = False
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
            route = None if self.turn is None else self.turn.first.route
            return Shown(self.choice, Progress(waiting=place, route=route))
        return Shown(self.choice, self._progress())

    def last(self, error: str = "") -> Shown:
        return Shown(self.choice, self._progress(), error, busy=False)

    def _progress(self) -> Progress:
        cut = self.finished and self.choice.finish == "length"
        finish: FinishReason | None = "cancelled" if self.stopped else "length" if cut else None
        return Progress(None, self._tokens, self._to_first_s(), self._rate(), finish)

    def _to_first_s(self) -> float | None:
        return None if self._first_s is None else self._first_s - self._asked_s

    def _rate(self) -> float | None:
        if self._first_s is None:
            return None
        later, running_s = self._tokens - self._first_tokens, time.monotonic() - self._first_s
        return later / running_s if later > 0 and running_s > 0 else None
