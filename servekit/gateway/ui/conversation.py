"""A conversation of the chat page, as the browser stores it, and as a request has it.

This module is independent of Gradio. All that comes from a browser is read here: malformed parts
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, TypeGuard

import msgspec

from servekit.errors import ModelUnavailable

#: The tags around a model's reasoning in the page's own messages; no model writes them.
THOUGHTS = ("<servekit-thoughts>", "</servekit-thoughts>")
#: The result that a model is told of a call that was not made.
NOT_MADE = "The user did not allow this call."

_IMAGE_ID = re.compile(r"[0-9a-f]{32}")
_MOST_NAME_CHARS = 200


class StoredImage(TypedDict):
    """An image of a message. The browser keeps the file itself by this id: see images.js."""

    id: str
    name: str


class StoredCall(TypedDict):
    """A call of a tool that an answer asks for, and its result once there is one."""

    id: str
    name: str  # of the function, as the model knows it
    tool: str  # of the server
    server: str
    arguments: str  # as the model wrote them; JSON, unless it erred
    outcome: NotRequired[Literal["done", "failed", "declined"]]
    result: NotRequired[str]


class StoredMessage(TypedDict):
    """A message of a conversation, as stored in the browser."""

    role: Literal["user", "assistant"]
    content: str
    images: NotRequired[list[StoredImage]]
    calls: NotRequired[list[StoredCall]]
    cut: NotRequired[Literal[True]]  # an answer that has not come to its end


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the page sends with a question: the turns so far, and the files of their images."""

    turns: list[StoredMessage]
    id: str = ""  # by which the browser stores it
    event: int = 0  # of the page, by its own count
    picked: list[StoredImage] = field(default_factory=list)  # for the next turn
    files: Mapping[str, str] = field(default_factory=dict)  # `data:` URIs by id


class Settings(msgspec.Struct, frozen=True):
    """The sampling settings of one browser; None is the model's default."""

    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_tokens: float | None = None
    seed: float | None = None

    @classmethod
    def from_fields(cls, system: str | None, *numbers: float | None) -> Settings:
        """Return the settings in the page's fields, in order.

        Until a page has been restored, Gradio sends 0 for each number: all of them are then empty.
        """
        return cls(system) if all(value == 0 for value in numbers) else cls(system, *numbers)


# ---------------------------------------------------------------- as a request has it


def make_body(
    model: str,
    turns: Sequence[StoredMessage],
    settings: Settings,
    files: Mapping[str, str],
    *,
    with_calls: bool = True,
) -> dict[str, Any]:
    """Return the conversation as a body of /v1/chat/completions.

    Without `with_calls`, for a model that knows no tools, earlier calls are left out. Raises
    ModelUnavailable if no model is chosen.
    """
    if not model:
        raise ModelUnavailable("no model is served yet")
    messages = make_messages(turns, files, with_calls=with_calls)
    if settings.system:
        messages.insert(0, {"role": "system", "content": settings.system})
    chosen = {
        name: _simplify_number(value)
        for name, value in msgspec.structs.asdict(settings).items()
        if name != "system" and value is not None
    }
    return {"model": model, "messages": messages, **chosen}


def make_messages(
    turns: Sequence[StoredMessage], files: Mapping[str, str], *, with_calls: bool = True
) -> list[dict[str, Any]]:
    """Return turns as messages of the API, each call with its result after it."""
    messages: list[dict[str, Any]] = []
    last_question = max((at for at, turn in enumerate(turns) if turn["role"] == "user"), default=0)
    for at, turn in enumerate(turns):
        content, calls = make_content(turn, files), turn.get("calls", [])
        message: dict[str, Any] = {"role": turn["role"], "content": content}
        if calls and with_calls:
            message["tool_calls"] = [_make_tool_call(call) for call in calls]
            if at > last_question and (thoughts := _get_thoughts(turn)):
                message["reasoning_content"] = thoughts  # a model goes on with its thoughts
            messages += [message, *(_make_result(call) for call in calls)]
        elif content or not calls:
            messages.append(message)
    return messages


def _make_tool_call(call: StoredCall) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _make_result(call: StoredCall) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": call.get("result", NOT_MADE)}


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


def _get_thoughts(turn: StoredMessage) -> str:
    """Return the reasoning before a turn's text."""
    content = turn["content"]
    return (
        content[len(THOUGHTS[0]) :].partition(THOUGHTS[1])[0] if content != _get_said(turn) else ""
    )


def _simplify_number(value: Any) -> Any:
    """Return a browser's number, with 40.0 as 40."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# ---------------------------------------------------------------- from the browser, and to it


def parse_conversation(sent: str | None) -> Conversation:
    """Return the conversation that a page sent, as JSON; malformed parts are left out."""
    try:
        found = msgspec.json.decode(sent or "{}")
    except msgspec.DecodeError:
        found = None
    given: dict[str, Any] = found if isinstance(found, dict) else {}
    files = given.get("files")
    id, event = given.get("id"), given.get("event")
    return Conversation(
        parse_turns(given.get("turns")),
        id if isinstance(id, str) else "",
        event if isinstance(event, int) else 0,
        _images_of(given.get("picked")),
        {name: file for name, file in files.items() if _is_file(file)}
        if isinstance(files, dict)
        else {},
    )


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
    if turn["role"] == "assistant" and (calls := _calls_of(item.get("calls"))):
        turn["calls"] = calls
    if turn["role"] == "assistant" and item.get("cut") is True:
        turn["cut"] = True
    return turn


def _calls_of(stored: Any) -> list[StoredCall]:
    try:
        return msgspec.convert(stored or [], list[StoredCall])
    except msgspec.ValidationError:
        return []


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


def _is_file(sent: Any) -> TypeGuard[str]:
    """Return whether it is a file; a page sends no address, which would have to be fetched."""
    return isinstance(sent, str) and sent.startswith("data:")


def store_turns(sent: Conversation, turns: Sequence[StoredMessage]) -> str:
    """Return what became of a conversation that a page sent as JSON, for the browser to store."""
    return msgspec.json.encode({"id": sent.id, "turns": turns, "event": sent.event}).decode()


def make_question(text: str, images: Sequence[StoredImage] = ()) -> StoredMessage:
    """Return a turn of the user."""
    turn = StoredMessage(role="user", content=text)
    if images:
        turn["images"] = list(images)
    return turn


# ---------------------------------------------------------------- in the page


def turn_at(turns: Sequence[StoredMessage], shown: int) -> int:
    """Return the index of the turn at a place of the page.

    Reasoning has a place of its own before the answer, images have one before the text, and calls
    one after it.
    """
    places = 0
    for at, turn in enumerate(turns):
        thinks = turn["role"] == "assistant" and turn["content"].startswith(THOUGHTS[0])
        parts = (thinks or "images" in turn, _get_said(turn).strip(), "calls" in turn)
        places += max(1, sum(map(bool, parts)))
        if shown < places:
            return at
    return len(turns)


def is_answered(turns: Sequence[StoredMessage]) -> bool:
    """Return whether the last question has an answer; one that ends with a call is none yet."""
    return not turns or (
        turns[-1]["role"] != "user" and "calls" not in turns[-1] and not is_cut(turns)
    )


def is_cut(turns: Sequence[StoredMessage]) -> bool:
    """Return whether the last answer has not come to its end."""
    return bool(turns) and "cut" in turns[-1]


def mark_cut(turns: list[StoredMessage]) -> list[StoredMessage]:
    """Return turns as they are stored while the last answer is coming, or when it has failed."""
    if not turns or turns[-1]["role"] == "user" or "calls" in turns[-1]:
        return turns
    return [*turns[:-1], {**turns[-1], "cut": True}]


def cut_to_question(turns: list[StoredMessage]) -> list[StoredMessage]:
    """Remove what comes after the last question, and return what is left."""
    while turns and turns[-1]["role"] != "user":
        turns.pop()
    return turns
