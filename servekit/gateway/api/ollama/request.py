"""Converts request bodies of Ollama's API to servekit's types.

Options about how Ollama would load a model (num_ctx, num_gpu, …) have no effect: the configuration
file decides that. Sampling options are served, or refused by name if ignoring one would change the
answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.openai.request import schema_grammar
from servekit.gateway.api.openai.schema import (
    INT64,
    MAX_STOPS,
    Fraction,
    Penalty,
    StopString,
    TopP,
)
from servekit.protocol.messages import (
    ChatMessage,
    Grammar,
    ModelInfo,
    SamplingParams,
    ToolCall,
)

#: Ollama accepts 10.0 for a whole number, and its clients send that.
Whole = int | float
Think = bool | Literal["low", "medium", "high"]


class Options(msgspec.Struct, kw_only=True):
    """How to choose tokens."""

    num_predict: Whole | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Whole | None = None
    top_p: TopP | None = None
    min_p: Fraction | None = None
    seed: Whole | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # refused by name if they are set:
    mirostat: Whole | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class Common(msgspec.Struct, kw_only=True):
    """What /api/chat and /api/generate take."""

    model: str = ""
    stream: bool | None = None
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    #: How long the model stays loaded: seconds, or a duration; 0: unload it, below 0: for ever.
    keep_alive: float | str | None = None


class CalledFunction(msgspec.Struct):
    """What was called, and with what."""

    name: str
    arguments: dict[str, Any] | str | None = None


class CalledTool(msgspec.Struct):
    """A call that the assistant made in an earlier turn."""

    function: CalledFunction
    id: str = ""


class InMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(Common, kw_only=True):
    """Body of POST /api/chat. Without messages it only asks for the model to be loaded."""

    messages: Annotated[list[InMessage], Meta(max_length=4096)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None


class GenerateRequest(Common, kw_only=True):
    """Body of POST /api/generate. Without a prompt it only asks for the model to be loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    # refused by name if they are set:
    suffix: str | None = None
    template: str | None = None
    context: list[Any] | None = None


class EmbedRequest(msgspec.Struct):
    """Body of POST /api/embed."""

    input: str | Annotated[list[str], Meta(max_length=2048)]
    model: str = ""
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=1048576)] | None = None
    keep_alive: float | str | None = None


class EmbeddingsRequest(msgspec.Struct):
    """Body of POST /api/embeddings, the older form."""

    prompt: str = ""
    model: str = ""
    keep_alive: float | str | None = None


class NameRequest(msgspec.Struct):
    """Body of POST /api/show and /api/pull."""

    model: str = ""
    name: str = ""
    # accepted without effect: models are served as configured
    stream: Any = None
    insecure: Any = None
    verbose: Any = None
    system: Any = None
    template: Any = None
    options: Any = None


# ---------------------------------------------------------------- sampling


def sampling(request: Common) -> SamplingParams:
    """Return the request's sampling parameters; None leaves a choice to the model."""
    options = request.options or Options()
    _refuse(options)
    stop = options.stop
    limit = _whole("num_predict", options.num_predict)
    top_k = _whole("top_k", options.top_k)
    return SamplingParams(
        max_tokens=limit if limit and limit > 0 else None,  # -1 and -2: no limit
        clamp=True,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=None if top_k is None else max(0, top_k),
        min_p=options.min_p,
        seed=_whole("seed", options.seed, INT64),
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        # penalises over the whole text: a window (repeat_last_n) is not supported, except 0
        repetition_penalty=1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=_grammar(request.format),
    )


def _whole(name: str, value: Whole | None, bound: int = 2**31) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and not value.is_integer():
        raise RequestError(f"options.{name}: expected a whole number", param=f"options.{name}")
    if not -bound <= value < bound:
        raise RequestError(f"options.{name} is out of range", param=f"options.{name}")
    return int(value)


def _refuse(options: Options) -> None:
    for name, nothing in (("mirostat", (0,)), ("tfs_z", (0, 1)), ("typical_p", (0, 1))):
        value = getattr(options, name)
        if value is not None and value not in nothing:
            raise Unsupported(
                f"options.{name} is not supported; leave it out", param=f"options.{name}"
            )


def _grammar(format: str | dict[str, Any] | None) -> Grammar | None:
    if format is None or format == "":
        return None
    if isinstance(format, dict):
        return schema_grammar(format)
    if format != "json":
        raise RequestError('format: expected "json" or a JSON schema', param="format")
    return schema_grammar({"type": "object"})


def template(think: Think | None, model: str, info: ModelInfo | None) -> dict[str, Any]:
    """Return the chat template's arguments. Raises Unsupported if the model cannot think."""
    if think is None:
        return {}
    if think and info is not None and not (info.dialect.think_end or _always_thinks(info)):
        raise Unsupported(f"think: the model {model!r} does not think", param="think")
    given: dict[str, Any] = {"enable_thinking": bool(think), "thinking": bool(think)}
    return given | {"reasoning_effort": think} if isinstance(think, str) else given


def _always_thinks(info: ModelInfo) -> bool:
    return info.dialect.tools == "harmony"


# ---------------------------------------------------------------- messages


def messages(given: list[InMessage]) -> list[ChatMessage]:
    """Return the chat messages. Raises Unsupported for images."""
    pending = Pending()
    return [_message(message, at, pending) for at, message in enumerate(given)]


def _message(message: InMessage, at: int, pending: Pending) -> ChatMessage:
    refuse_images(message.images, f"messages[{at}].images")
    calls = tuple(_calls(message, at))
    pending.add(calls)
    name, answers = message.tool_name, message.tool_call_id
    if message.role == "tool" and (call := pending.answer(name, answers)) is not None:
        name, answers = call.name, call.id
    text = message.content or ""
    return ChatMessage(message.role, text, name, calls, answers, message.thinking)


class Pending:
    """Unanswered calls: an answer in Ollama's API names the tool, but templates need the call."""

    def __init__(self) -> None:
        self._by_id: dict[str, ToolCall] = {}
        self._by_name: dict[str, deque[str]] = {}

    def add(self, calls: Iterable[ToolCall]) -> None:
        for call in calls:
            self._by_id[call.id] = call
            self._by_name.setdefault(call.name, deque()).append(call.id)

    def answer(self, name: str | None, id: str | None) -> ToolCall | None:
        """Return the answered call: by its id, else the first call of that tool, or of any tool."""
        if id is not None:
            return self._by_id.pop(id, None)
        if name is None:
            first = next(iter(self._by_id), "")
            return self._by_id.pop(first, None)
        ids = self._by_name.get(name, deque())
        while ids:
            if (call := self._by_id.pop(ids.popleft(), None)) is not None:
                return call
        return None


def _calls(message: InMessage, at: int) -> Iterator[ToolCall]:
    for index, call in enumerate(message.tool_calls or ()):
        arguments = call.function.arguments or {}
        if isinstance(arguments, str):
            where = f"messages[{at}].tool_calls[{index}].function.arguments"
            raise RequestError(f"{where}: expected an object", param=where)
        id = call.id or f"call_{at:04}{index:05}"  # nine letters and digits, as Mistral has them
        yield ToolCall(id, call.function.name, msgspec.json.encode(arguments).decode())


def refuse_images(images: list[Any] | None, where: str) -> None:
    if images:
        raise Unsupported(f"{where}: the model takes text, no images", param="images")


def generate_messages(request: GenerateRequest) -> list[ChatMessage]:
    """Return the conversation that /api/generate makes of a prompt for a chat model."""
    system = [ChatMessage("system", request.system)] if request.system else []
    return [*system, ChatMessage("user", request.prompt or "")]


def check_generate(request: GenerateRequest) -> None:
    """Raise Unsupported for parameters that are not served."""
    refuse_images(request.images, "images")
    for name, instead in (
        ("suffix", "leave it out"),
        ("template", "the model's own is used; raw: true goes without"),
        ("context", "use /api/chat for a conversation"),
    ):
        if getattr(request, name):
            raise Unsupported(f"{name} is not supported; {instead}", param=name)
    if request.raw and request.system:
        raise RequestError("raw: the prompt is taken as it is, without `system`", param="raw")
