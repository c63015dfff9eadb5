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
from servekit.gateway.api.fields import (
    FORM,
    QUESTION,
    EmbeddingModel,
    Ignored,
    ModelName,
    Stream,
    Tools,
    doc,
)
from servekit.gateway.api.images import make_message, read_base64, read_data_uri
from servekit.gateway.api.openai.request import schema_grammar
from servekit.gateway.api.openai.schema import (
    INT64,
    TOP_K,
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Stop,
    TopLogprobs,
    TopP,
)
from servekit.protocol.messages import (
    ChatMessage,
    Grammar,
    Media,
    ModelInfo,
    SamplingParams,
    ToolCall,
)

#: Ollama accepts 10.0 for a whole number, and its clients send that.
Whole = int | float
Think = bool | Literal["low", "medium", "high"]
Images = Annotated[list[str], doc("Images before the text: PNG, JPEG, WebP or GIF, in base64")]
Stay = Annotated[
    float | str,
    doc(
        "How long a model that is loaded on demand stays loaded: seconds, or a duration such as 5m."
        " 0: unload it; below 0: keep it loaded"
    ),
]
EXAMPLE = [{"role": "user", "content": QUESTION}]


class Options(msgspec.Struct, kw_only=True):
    """Sampling parameters. Options of loading have no effect: the configuration file decides."""

    num_predict: Whole | None = None
    """Most tokens to generate; below 1: as many as fit into the context."""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy; the default is the model's own."""
    top_k: Annotated[Whole | None, TOP_K] = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Annotated[Whole | None, doc("The same seed gives the same answer")] = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Whole | None = None
    """0 turns `repeat_penalty` off; any other value means all of the text."""
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    # refused by name if they are set:
    mirostat: Annotated[Whole | None, doc("Not supported, except 0")] = None
    tfs_z: Annotated[float | None, doc("Not supported, except 0 and 1")] = None
    typical_p: Annotated[float | None, doc("Not supported, except 0 and 1")] = None
    # of loading, of mirostat, and of older versions:
    numa: Ignored = None
    num_ctx: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    main_gpu: Ignored = None
    low_vram: Ignored = None
    f16_kv: Ignored = None
    logits_all: Ignored = None
    vocab_only: Ignored = None
    use_mmap: Ignored = None
    use_mlock: Ignored = None
    embedding_only: Ignored = None
    num_thread: Ignored = None
    num_keep: Ignored = None
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    penalize_newline: Ignored = None


class Common(msgspec.Struct, kw_only=True):
    """The fields that /api/chat and /api/generate share."""

    model: ModelName = ""
    stream: Annotated[Stream, Meta(examples=[False])] | None = None
    options: Annotated[Options | None, doc("Sampling parameters")] = None
    format: Annotated[str | dict[str, Any] | None, FORM] = None
    think: Think | None = None
    """Whether to think, or how much; refused for a model that does not think."""
    logprobs: Annotated[bool, doc("Return the log probabilities of the tokens")] | None = None
    top_logprobs: TopLogprobs | None = None
    keep_alive: Stay | None = None


class CalledFunction(msgspec.Struct):
    """The function of a call, and its arguments."""

    name: Annotated[str, doc("The name of the function")]
    arguments: Annotated[dict[str, Any] | str | None, doc("The arguments, an object")] = None


class CalledTool(msgspec.Struct):
    """A call that the assistant made in an earlier turn."""

    function: Annotated[CalledFunction, doc("The function and its arguments")]
    id: Annotated[str, doc("The id that the answer had")] = ""


class InMessage(msgspec.Struct):
    """A message of a conversation."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], doc("The speaker", "user")]
    content: Annotated[str, doc("The text", QUESTION)] | None = None
    thinking: Annotated[str, doc("The assistant's thoughts")] | None = None
    images: Images | None = None
    tool_calls: list[CalledTool] | None = None
    """The calls that the assistant made in this turn."""
    tool_name: Annotated[str, doc("The tool that has this result")] | None = None
    tool_call_id: Annotated[str, doc("The id of the call that this answers")] | None = None


class ChatRequest(Common, kw_only=True):
    """Body of POST /api/chat. Without messages it only asks for the model to be loaded."""

    messages: Annotated[list[InMessage], Meta(max_length=4096, examples=[EXAMPLE])] | None = None
    """The conversation. `server.limits.messages` may allow fewer messages."""
    tools: Tools | None = None


class GenerateRequest(Common, kw_only=True):
    """Body of POST /api/generate. Without a prompt it only asks for the model to be loaded."""

    prompt: Annotated[str, doc("The prompt", QUESTION)] | None = None
    system: Annotated[str, doc("A system message before the prompt")] | None = None
    raw: Annotated[bool, doc("Use the prompt without the chat template")] | None = None
    images: Images | None = None
    # refused by name if they are set:
    suffix: Annotated[str, doc("Not supported")] | None = None
    template: Annotated[str, doc("Not supported; use `raw` for none")] | None = None
    context: Annotated[list[Any], doc("Not supported; use /api/chat")] | None = None


class EmbedRequest(msgspec.Struct):
    """Body of POST /api/embed."""

    input: Annotated[
        str | Annotated[list[str], Meta(max_length=2048)],
        doc("A text, or several", ["one text", "another"]),
    ]
    model: EmbeddingModel = ""
    truncate: bool | None = None
    """Cut texts to the model's context, which is the default, instead of refusing them."""
    dimensions: Annotated[int, Meta(ge=0, le=1048576)] | None = None
    """Size of the vectors: the first numbers of each, normalised to a unit vector."""
    keep_alive: Stay | None = None


class EmbeddingsRequest(msgspec.Struct):
    """Body of POST /api/embeddings, the older form."""

    prompt: Annotated[str, doc("The text", "one text")] = ""
    model: EmbeddingModel = ""
    keep_alive: Stay | None = None


class NameRequest(msgspec.Struct):
    """Body of POST /api/show and /api/pull."""

    model: ModelName = ""
    name: Annotated[str, doc("The older name of `model`")] = ""
    # models are served as configured:
    stream: Ignored = None
    insecure: Ignored = None
    verbose: Ignored = None
    system: Ignored = None
    template: Ignored = None
    options: Ignored = None


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
    """Return the chat messages. Raises RequestError for wrong images."""
    pending = Pending()
    return [_message(message, at, pending) for at, message in enumerate(given)]


def _message(message: InMessage, at: int, pending: Pending) -> ChatMessage:
    images = _read_images(message.images, message.role, f"messages[{at}].images")
    calls = tuple(_calls(message, at))
    pending.add(calls)
    name, answers = message.tool_name, message.tool_call_id
    if message.role == "tool" and (call := pending.answer(name, answers)) is not None:
        name, answers = call.name, call.id
    text = message.content or ""
    return ChatMessage(message.role, text, name, calls, answers, message.thinking, images)


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


def _read_images(given: list[str] | None, role: str, where: str) -> tuple[Media, ...]:
    read = (
        (read_data_uri if one.startswith("data:") else read_base64)(one, f"{where}[{at}]")
        for at, one in enumerate(given or ())
    )
    return make_message(role, tuple(read), where).media


def generate_messages(request: GenerateRequest) -> list[ChatMessage]:
    """Return the conversation that /api/generate makes of a prompt for a chat model."""
    system = [ChatMessage("system", request.system)] if request.system else []
    images = _read_images(request.images, "user", "images")
    return [*system, ChatMessage("user", request.prompt or "", media=images)]


def check_generate(request: GenerateRequest) -> None:
    """Raise Unsupported for parameters that are not served."""
    for name, instead in (
        ("suffix", "leave it out"),
        ("template", "the model's own is used; raw: true goes without"),
        ("context", "use /api/chat for a conversation"),
    ):
        if getattr(request, name):
            raise Unsupported(f"{name} is not supported; {instead}", param=name)
    if request.raw and request.system:
        raise RequestError("raw: the prompt is taken as it is, without `system`", param="raw")
    if request.raw and request.images:
        raise RequestError("raw: images need the chat template", param="raw")
