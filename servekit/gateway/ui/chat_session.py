"""The answers of the chat page: runs of requests, and the calls of tools between them.

This module is independent of Gradio: `Chats.answer_turn` yields what the page has to show. The
browser stores the conversation; the gateway keeps only the answers under way, by browser session. A
tool is called only after the visitor has allowed that call here, whatever the browser sends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from servekit.errors import RequestError
from servekit.gateway.generation.generation import Choice
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.task_check import known_info
from servekit.gateway.tool_servers.registry import Offer
from servekit.gateway.ui.conversation import (
    THOUGHTS,
    Settings,
    StoredCall,
    StoredMessage,
    make_body,
)
from servekit.gateway.ui.widgets.request_runner import CHAT, Progress, RequestOptions, Runs, Visit

#: Time between two saves of an answer under way in the browser, s.
SAVE_S = 1.0
#: Requests for one question: a model that calls tools for ever is stopped.
MOST_ROUNDS = 20
#: Calls of one answer that its visitor is asked for.
MOST_CALLS = 16
#: Time between two looks at calls that run, s.
_LOOK_S = 0.2
_NO_TOOLS = Offer()
#: The most sessions whose permissions are kept; a forgotten one is asked again.
_MOST_ALLOWING = 1000
#: What a visitor answers to a call: this one, all further ones of its tool in this conversation, or
#: none.
Decision = Literal["allow", "always", "decline"]
Tools = frozenset[tuple[str, str]]  # by server and name
OpenOffer = Callable[[], Coroutine[Any, Any, Offer]]


@dataclass(frozen=True, slots=True)
class View:
    """The state of the page; with `save`, the browser stores the conversation now."""

    turns: list[StoredMessage]
    progress: Progress
    error: str = ""
    save: bool = False
    busy: bool = True
    starting: bool = False  # the MCP servers are asked for their tools
    asks: StoredCall | None = None  # whether the visitor allows it
    calling: tuple[str, ...] = ()  # the tools that run


class Answer:
    """An answer under way: the turns so far, and what it waits for.

    `event` is the number of its question's event, by the page's count.
    """

    def __init__(self, turns: list[StoredMessage], event: int) -> None:
        self.turns = turns
        self.event = event
        self.progress = Progress()
        self.stopped = self.dropped = False
        self.allowed: Tools = frozenset()
        self.asks: StoredCall | None = None
        self.decision: asyncio.Future[Decision] | None = None
        self.calls: list[asyncio.Task[Any]] = []
        self._saved_s = float("-inf")

    def view(self, *, save: bool = False, **more: Any) -> View:
        """Return what the page shows now; it saves at the first view, and then in intervals."""
        now_s = time.monotonic()
        if save or now_s - self._saved_s > SAVE_S:
            save, self._saved_s = True, now_s
        return View(self.turns, self.progress, save=save, **more)

    def last(self, error: str = "") -> View:
        return View(self.turns, self.progress, error, save=True, busy=False)

    async def wait_for(self, opening: Coroutine[Any, Any, Offer]) -> Offer | None:
        """Return the offer; None if the answer is stopped or dropped before. Raises its errors."""
        task = asyncio.create_task(opening)
        self.calls = [task]
        await asyncio.wait(self.calls)
        return None if task.cancelled() else task.result()

    def cancel(self) -> None:
        """End what it waits for."""
        if self.decision is not None and not self.decision.done():
            self.decision.set_result("decline")
        for call in self.calls:
            call.cancel()


class Chats:
    """The answers under way, one per browser session."""

    def __init__(self, router: Router, runs: Runs) -> None:
        self._router = router
        self._runs = runs
        self._answers: dict[str, Answer] = {}
        #: What a session always allows: (conversation, tools).
        self._allowed: dict[str, tuple[str, Tools]] = {}

    async def answer_turn(
        self,
        visit: Visit,
        model: str,
        turns: Sequence[StoredMessage],
        settings: Settings,
        files: Mapping[str, str] | None = None,
        open_offer: OpenOffer | None = None,
        conversation: str = "",
        event: int = 0,
    ) -> AsyncGenerator[View, None]:
        """Answer the last turn; when stopped, end with the text so far.

        `files` has the images of the turns, as in `Conversation`; one that is missing is not sent.
        The model may call the tools that `open_offer` returns: each call waits for `decide_call`,
        unless the visitor always allows its tool in `conversation`.

        Cancels the request if it is stopped, dropped, replaced by a newer question of the same
        session, or closed because the browser has disconnected.
        """
        session = visit.session
        self.drop_answer(session)
        answer = self._answers[session] = Answer(list(turns), event)
        kept = self._allowed.get(session)
        answer.allowed = kept[1] if kept and kept[0] == conversation else frozenset()
        make = partial(self._make_options, model, settings, files or {})
        try:
            async with aclosing(self._stream_rounds(answer, visit, make, open_offer)) as views:
                async for view in views:
                    if answer.dropped:
                        return
                    yield view
        except RequestError as error:
            if not answer.dropped:
                yield answer.last(error.message)
        finally:
            answer.cancel()
            self._keep_allowed(session, conversation, answer.allowed)
            if self._answers.get(session) is answer:
                del self._answers[session]

    async def _stream_rounds(
        self,
        answer: Answer,
        visit: Visit,
        make_options: Callable[[Answer, Offer], RequestOptions],
        open_offer: OpenOffer | None,
    ) -> AsyncGenerator[View, None]:
        """Ask the model, and make its calls, until it calls no more; the last view is not busy."""
        offer = _NO_TOOLS
        if open_offer is not None:
            yield answer.view(starting=True)
            if (opened := await answer.wait_for(open_offer())) is None:
                yield answer.last()
                return
            offer = opened
        for _ in range(MOST_ROUNDS):
            options = make_options(answer, offer)
            for part in (
                self._run_request(answer, visit, options, offer),
                self._make_calls(answer, offer),
            ):
                async with aclosing(part) as views:
                    async for view in views:
                        yield view
                        if not view.busy:
                            return
                if answer.dropped:
                    return
        yield answer.last(f"the model called tools {MOST_ROUNDS} times for one question")

    def decide_call(self, session: str, call: str, decision: Decision) -> None:
        """Take a visitor's answer to the call by this id; another one has been answered before."""
        answer = self._answers.get(session)
        if answer is None or answer.asks is None or answer.asks["id"] != call:
            return
        if answer.decision is not None and not answer.decision.done():
            answer.decision.set_result(decision)

    def stop_answer(self, session: str, event: int = 0) -> None:
        """End the answer to this question, and keep its text so far; a later one goes on."""
        answer = self._answers.get(session)
        if answer is not None and answer.event == event:
            answer.stopped = True
            answer.cancel()
            self._runs.stop_runs(session)

    def drop_answer(self, session: str) -> None:
        """End the session's answer, and show no more of it."""
        if answer := self._answers.pop(session, None):
            answer.dropped = True
            answer.cancel()
            self._runs.drop_runs(session)

    def _keep_allowed(self, session: str, conversation: str, allowed: Tools) -> None:
        self._allowed.pop(session, None)
        if allowed:
            self._allowed[session] = conversation, allowed
        while len(self._allowed) > _MOST_ALLOWING:
            del self._allowed[next(iter(self._allowed))]

    # ---- one request

    def _make_options(
        self,
        model: str,
        settings: Settings,
        files: Mapping[str, str],
        answer: Answer,
        offer: Offer,
    ) -> RequestOptions:
        info = known_info(self._router.find(model)) if self._router.serves(model) else None
        with_calls = info is None or "tools" in info.serves
        body = make_body(model, answer.turns, settings, files, with_calls=with_calls)
        return RequestOptions(CHAT, body | ({"tools": offer.define()} if offer.tools else {}))

    async def _run_request(
        self, answer: Answer, visit: Visit, options: RequestOptions, offer: Offer
    ) -> AsyncGenerator[View, None]:
        """Yield views of an answer; the last one is busy if the model waits for its calls."""
        before = answer.turns
        async with aclosing(self._runs.stream_run(visit, options)) as run:
            async for shown in run:
                turn = make_answer(shown.choice, offer, thinking=shown.busy)
                answer.turns = before if turn is None else [*before, turn]
                answer.progress = shown.progress
                if shown.busy:
                    yield answer.view()
                elif shown.error or answer.stopped or turn is None or "calls" not in turn:
                    yield answer.last(shown.error)

    # ---- calls of tools

    async def _make_calls(self, answer: Answer, offer: Offer) -> AsyncGenerator[View, None]:
        """Ask for each call of the last turn, and make those that are allowed."""
        asked = answer.turns[-1]["calls"]
        refused = f"Only {MOST_CALLS} calls are made at once; this one is not."
        self._settle(answer, asked[MOST_CALLS:], "failed", refused)
        approved: list[StoredCall] = []
        for call in asked[:MOST_CALLS]:
            if refusal := refuse_call(call, offer):
                self._settle(answer, [call], "failed", refusal)
                continue
            tool = call["server"], call["tool"]
            if tool not in answer.allowed:
                answer.asks, answer.decision = call, asyncio.get_running_loop().create_future()
                yield answer.view(save=True, asks=call)
                decision = await answer.decision
                answer.asks = answer.decision = None
                if answer.stopped or answer.dropped:
                    break
                if decision == "decline":
                    self._settle(answer, [call], "declined")
                    continue
                if decision == "always":
                    answer.allowed |= {tool}
            approved.append(call)
        if not answer.stopped:
            async with aclosing(self._wait_for(answer, offer, approved)) as views:
                async for view in views:
                    yield view
        if answer.stopped:
            left = [call for call in answer.turns[-1]["calls"] if "outcome" not in call]
            self._settle(answer, left, "declined")
            yield answer.last()

    async def _wait_for(
        self, answer: Answer, offer: Offer, approved: Sequence[StoredCall]
    ) -> AsyncGenerator[View, None]:
        """Make calls side by side, and yield views until all have ended."""

        async def make(call: StoredCall) -> None:
            arguments = msgspec.json.decode(call["arguments"] or "{}")
            result = await offer.call(offer.tools[call["name"]], arguments)
            self._settle(answer, [call], "failed" if result.is_error else "done", result.text)

        answer.calls = [asyncio.create_task(make(call)) for call in approved]
        names = tuple(call["tool"] for call in approved)
        while left := [task for task in answer.calls if not task.done()]:
            yield answer.view(calling=names)
            await asyncio.wait(left, timeout=_LOOK_S)
        for task in answer.calls:
            if not task.cancelled():
                task.result()
        yield answer.view(save=True)

    @staticmethod
    def _settle(
        answer: Answer,
        calls: Sequence[StoredCall],
        outcome: Literal["done", "failed", "declined"],
        result: str | None = None,
    ) -> None:
        """Note the outcome of calls of the last turn."""
        ids = {call["id"] for call in calls}
        last = answer.turns[-1]
        settled: list[StoredCall] = []
        for call in last["calls"]:
            settled.append(call)
            if call["id"] in ids:
                settled[-1] = {**call, "outcome": outcome}
                if result is not None:
                    settled[-1]["result"] = result
        answer.turns = [*answer.turns[:-1], {**last, "calls": settled}]


def make_answer(choice: Choice, offer: Offer, *, thinking: bool) -> StoredMessage | None:
    """Return an answer so far as a turn; None while it is empty."""
    text = choice.text
    if choice.reasoning:
        open_still = thinking and not text and not choice.calls
        text = f"{THOUGHTS[0]}{choice.reasoning}{'' if open_still else THOUGHTS[1]}{text}"
    turn = StoredMessage(role="assistant", content=text)
    if choice.calls:
        turn["calls"] = [
            StoredCall(
                id=call.id,
                name=call.name,
                tool=found.tool.name if (found := offer.tools.get(call.name)) else call.name,
                server=found.server.server.name if found else "",
                arguments=call.arguments,
            )
            for call in choice.calls
        ]
    return turn if text or choice.calls else None


def refuse_call(call: StoredCall, offer: Offer) -> str:
    """Return why a call cannot be made, for the model; "" if it can."""
    if call["name"] not in offer.tools:
        return f"There is no tool {call['name'][:64]!r}."
    try:
        arguments = msgspec.json.decode(call["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        return f"The arguments are no JSON: {error}"
    return "" if isinstance(arguments, dict) else "The arguments must be a JSON object."
