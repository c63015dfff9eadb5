"""A conversation in the browser, answered through the router like any HTTP request.

This module is independent of Gradio: `Chats.answer_turn` yields what the page has to show. The
browser stores the conversation; the gateway keeps only the running requests, by browser session.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, TypeGuard

import msgspec

from servekit.errors import ModelUnavailable, RequestError
from servekit.gateway.api.openai.request import chat_messages, sampling
from servekit.gateway.api.openai.schema import ChatRequest, decode
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.preset_route import complete_chat, complete_params
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.tool_parsing import Parser, Reasoning, Text, begins_thinking, parser
from servekit.protocol.types import FinishReason

#: Time between two updates of one page, s. Each answer under way adds its share, which bounds the
#: updates of all pages together to about a hundred per second.
UPDATE_S = 0.08
UPDATE_PER_ANSWER_S = 0.01
#: Time between two saves of an answer under way in the browser, s.
SAVE_S = 1.0


#: The tags around a model's reasoning in the page's own messages; no model writes them.
THOUGHTS = ("<servekit-thoughts>", "</servekit-thoughts>")


_IMAGE_ID = re.compile(r"[0-9a-f]{32}")
_MOST_NAME_CHARS = 200


class StoredImage(TypedDict):
    """An image of a message. The browser keeps the file itself by this id: see images.js."""

    id: str
    name: str


class StoredMessage(TypedDict):
    """A message of a conversation, as stored in the browser."""

    role: Literal["user", "assistant"]
    content: str
    images: NotRequired[list[StoredImage]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the page sends with a question: the turns so far, and the files of their images."""

    turns: list[StoredMessage]
    id: str = ""  # by which the browser stores it
    picked: list[StoredImage] = field(default_factory=list)  # for the next turn
    files: Mapping[str, str] = field(default_factory=dict)  # `data:` URIs by id


@dataclass(frozen=True, slots=True)
class Visit:
    """The visitor of a page: browser session, address, and the authorization header if any."""

    session: str
    client: str
    authorization: str = ""


class Settings(msgspec.Struct, frozen=True):
    """The sampling settings of one browser; None is the model's default."""

    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_tokens: float | None = None
    seed: float | None = None


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
class View:
    """The state of the page; with `save`, the browser stores the conversation now."""

    turns: list[StoredMessage]
    progress: Progress
    error: str = ""
    save: bool = False
    busy: bool = True


class Chats:
    """The answers under way, one per browser session."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._answers: dict[str, StreamedAnswer] = {}

    async def answer_turn(
        self,
        visit: Visit,
        model: str,
        turns: Sequence[StoredMessage],
        settings: Settings,
        files: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[View, None]:
        """Answer the last turn; when stopped, end with the text so far.

        `files` has the images of the turns, as in `Conversation`; one that is missing is not sent.

        Cancels the request if it is stopped, dropped, replaced by a newer question of the same
        session, or closed because the browser has disconnected.
        """
        session = visit.session
        self.drop_answer(session)
        answer = self._answers[session] = StreamedAnswer(list(turns), self._parser(model))
        try:
            caller = await self._router.access.charge_page_visitor(visit.authorization)
            request = request_of(model, turns, settings, files or {})
            call = self._open(model, request, visit.client, caller)
            answer.call = call
            async for view in self._stream_tokens(answer, call):
                if answer.dropped:
                    return
                yield view
        except RequestError as error:
            if not answer.dropped:
                yield answer.last(error.message)
        finally:
            answer.cancel()
            if self._answers.get(session) is answer:
                del self._answers[session]

    def stop_answer(self, session: str) -> None:
        """End the session's answer, and keep its text so far."""
        if answer := self._answers.get(session):
            answer.stopped = True
            answer.cancel()

    def drop_answer(self, session: str) -> None:
        """End the session's answer, and show no more of it."""
        if answer := self._answers.pop(session, None):
            answer.dropped = True
            answer.cancel()

    def _open(
        self, model: str, request: ChatRequest, client: str, caller: ApiKey | None
    ) -> InflightRequest:
        route = self._router.find(model)
        if route.status.info is not None and not route.status.info.chat:
            raise RequestError(f"{model!r} has no chat template; use /v1/completions")
        params = complete_params(route, sampling(request))
        messages, template = complete_chat(route, chat_messages(request.messages), {})
        more = {"template": template} if template else {}
        call = InflightRequest(model, params, messages=messages, key=client, more=more)
        call.caller = caller
        return self._router.open(call)

    def _parser(self, model: str) -> Parser | None:
        """Return a parser that separates reasoning; None if the model has no reasoning format."""
        if not self._router.serves(model):
            return None
        info = (route := self._router.find(model)).status.info
        if info is None or not (info.dialect.think_end or info.dialect.tools == "harmony"):
            return None
        begun = begins_thinking(info.dialect, complete_chat(route, [], {})[1], False)
        return parser(info.dialect, tools=False, reasoning=True, thinking=begun)

    async def _stream_tokens(
        self, answer: StreamedAnswer, call: InflightRequest
    ) -> AsyncGenerator[View, None]:
        saved_s = time.monotonic()
        yield answer.view(self._describe_wait(call), save=True)
        while answer.progress.finish is None:
            interval_s = UPDATE_S + UPDATE_PER_ANSWER_S * len(self._answers)
            await answer.collect(interval_s)
            save = time.monotonic() - saved_s > SAVE_S
            saved_s = time.monotonic() if save else saved_s
            if answer.progress.finish is None:
                yield answer.view(self._describe_wait(call), save=save)
        yield answer.last()

    def _describe_wait(self, call: InflightRequest) -> Progress | None:
        """Return what a request waits for; None once it runs."""
        if call.replica is not None or call.done:
            return None
        place = self._router.position(call)
        return None if place is None else Progress(waiting=place, route=call.route)


class StreamedAnswer:
    """An answer under way: its text so far, and its times."""

    def __init__(self, turns: list[StoredMessage], parse: Parser | None = None) -> None:
        self.turns = turns
        self._parse = parse
        self._thoughts: list[str] = []
        self.call: InflightRequest | None = None
        self.stopped = False
        self.dropped = False
        self.progress = Progress()
        self._text: list[str] = []
        self._asked_s = time.monotonic()
        self._first_s: float | None = None
        self._first_tokens = 0  # the tokens that arrived together with the first one
        self._reading: asyncio.Task[Any] | None = None

    async def collect(self, interval_s: float) -> None:
        """Collect the tokens of one interval with one read, at whatever rate they arrive.

        Returns early at the first token and at the end.
        """
        assert self.call is not None
        deadline_s = time.monotonic() + interval_s
        if self._reading is None:
            self._reading = asyncio.ensure_future(self.call.next_delta())
            self._reading.add_done_callback(_looked_at)
        done, _ = await asyncio.wait([self._reading], timeout=interval_s)
        if not done:
            return
        reading, self._reading = self._reading, None
        silent = self._first_s is None
        self._take(reading)
        if self.progress.finish is None and not silent:
            await asyncio.sleep(deadline_s - time.monotonic())  # let more tokens arrive

    def _take(self, reading: asyncio.Task[Any]) -> None:
        try:
            delta = reading.result()
        except RequestError:
            if not (self.stopped or self.dropped):
                raise
            self.progress = self._measure("cancelled", self.progress.tokens)
            return
        assert self.call is not None
        tokens = max(self.progress.tokens, len(self.call.emitted))
        self._read(delta.text, ended=delta.finish is not None)
        if self._first_s is None and tokens:
            self._first_s, self._first_tokens = time.monotonic(), tokens
        tokens = delta.completion_tokens if delta.finish else tokens
        self.progress = self._measure(delta.finish, tokens)

    def _read(self, text: str, *, ended: bool) -> None:
        if self._parse is None:
            self._text.append(text)
            return
        events = self._parse.feed(text) + (self._parse.end() if ended else [])
        self._thoughts += [event.text for event in events if isinstance(event, Reasoning)]
        self._text += [event.text for event in events if isinstance(event, Text)]

    def _measure(self, finish: FinishReason | None, tokens: int) -> Progress:
        if self._first_s is None:
            return Progress(tokens=tokens, finish=finish)
        running_s = time.monotonic() - self._first_s
        later = tokens - self._first_tokens
        rate = later / running_s if later > 0 and running_s > 0 else None
        return Progress(None, tokens, self._first_s - self._asked_s, rate, finish)

    def view(self, waiting: Progress | None, *, save: bool) -> View:
        return View(self._shown(), waiting or self.progress, save=save)

    def last(self, error: str = "") -> View:
        return View(self._shown(), self.progress, error, save=True, busy=False)

    def _shown(self) -> list[StoredMessage]:
        text = "".join(self._text)
        self._text = [text]
        if self._thoughts:
            self._thoughts = ["".join(self._thoughts)]
            thinking = not text and self.progress.finish is None
            text = f"{THOUGHTS[0]}{self._thoughts[0]}{'' if thinking else THOUGHTS[1]}{text}"
        return [*self.turns, StoredMessage(role="assistant", content=text)] if text else self.turns

    def cancel(self) -> None:
        """Cancel the request, whether it waits or runs."""
        if self.call is not None:
            self.call.cancel()


def _looked_at(reading: asyncio.Task[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it when the page has gone."""
    if not reading.cancelled():
        reading.exception()


def request_of(
    model: str,
    turns: Sequence[StoredMessage],
    settings: Settings,
    files: Mapping[str, str] | None = None,
) -> ChatRequest:
    """Return the conversation as a body of /v1/chat/completions, checked by the same rules.

    Raises RequestError with the message that HTTP clients get.
    """
    if not model:
        raise ModelUnavailable("no model is served yet")
    messages: list[dict[str, Any]] = [{"role": "system", "content": settings.system or ""}]
    messages += [
        {"role": turn["role"], "content": make_content(turn, files or {})} for turn in turns
    ]
    chosen = {
        name: _simplify_number(value)
        for name, value in msgspec.structs.asdict(settings).items()
        if name != "system" and value is not None
    }
    body = {"model": model, "messages": messages if settings.system else messages[1:], **chosen}
    return decode(ChatRequest, msgspec.json.encode(body))


def make_content(turn: StoredMessage, files: Mapping[str, str]) -> str | list[dict[str, Any]]:
    """Return a turn's content for the API: its text, after its images if there are any."""
    said = _get_said(turn)
    found = [files[image["id"]] for image in turn.get("images", ()) if image["id"] in files]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in found]
    if not parts:
        return said
    return [*parts, {"type": "text", "text": said}] if said.strip() else parts


def _get_said(turn: StoredMessage) -> str:
    """Return a turn's text without its reasoning: models should not see their earlier reasoning."""
    content = turn["content"]
    return content.partition(THOUGHTS[1])[2] if content.startswith(THOUGHTS[0]) else content


def turn_at(turns: Sequence[StoredMessage], shown: int) -> int:
    """Return the index of the turn at a place of the page.

    Reasoning has a place of its own before the answer, and so have images before the text.
    """
    places = 0
    for at, turn in enumerate(turns):
        thinks = turn["role"] == "assistant" and turn["content"].startswith(THOUGHTS[0])
        apart = thinks or "images" in turn
        places += 2 if apart and _get_said(turn).strip() else 1
        if shown < places:
            return at
    return len(turns)


def _simplify_number(value: Any) -> Any:
    """Return a browser's number, with 40.0 as 40."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_turns(stored: Any) -> list[StoredMessage]:
    """Return the turns that a browser sent, without malformed ones."""
    if not isinstance(stored, list):
        return []
    return [
        _make_turn(item)
        for item in stored
        if isinstance(item, dict)
        and item.get("role") in ("user", "assistant")
        and isinstance(item.get("content"), str)
    ]


def _make_turn(item: dict[str, Any]) -> StoredMessage:
    turn = StoredMessage(role=item["role"], content=item["content"])
    if turn["role"] == "user" and (images := _images_of(item.get("images"))):
        turn["images"] = images
    return turn


def _images_of(stored: Any) -> list[StoredImage]:
    if not isinstance(stored, list):
        return []
    return [
        StoredImage(id=item["id"], name=item["name"][:_MOST_NAME_CHARS])
        for item in stored
        if isinstance(item, dict)
        and isinstance(item.get("id"), str)
        and _IMAGE_ID.fullmatch(item["id"])
        and isinstance(item.get("name"), str)
    ]


def parse_conversation(sent: str | None) -> Conversation:
    """Return the conversation that a page sent, as JSON; malformed parts are left out."""
    try:
        found = msgspec.json.decode(sent or "{}")
    except msgspec.DecodeError:
        found = None
    given: dict[str, Any] = found if isinstance(found, dict) else {}
    files = given.get("files")
    id = given.get("id")
    return Conversation(
        parse_turns(given.get("turns")),
        id if isinstance(id, str) else "",
        _images_of(given.get("picked")),
        {name: file for name, file in files.items() if _is_file(file)}
        if isinstance(files, dict)
        else {},
    )


def store_turns(id: str, turns: Sequence[StoredMessage]) -> str:
    """Return a conversation as JSON, for the browser to store by its id."""
    return msgspec.json.encode({"id": id, "turns": turns}).decode()


def _is_file(sent: Any) -> TypeGuard[str]:
    """Return whether it is a file; a page sends no address, which would have to be fetched."""
    return isinstance(sent, str) and sent.startswith("data:")


def make_question(text: str, images: Sequence[StoredImage] = ()) -> StoredMessage:
    """Return a turn of the user."""
    turn = StoredMessage(role="user", content=text)
    if images:
        turn["images"] = list(images)
    return turn
