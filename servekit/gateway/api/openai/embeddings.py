"""OpenAI's embeddings, and tokenization: answers that need no generation."""

from __future__ import annotations

import array
import base64
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.endpoint import EndpointFactory
from servekit.gateway.api.fields import EmbeddingModel, ModelName, Tools, doc
from servekit.gateway.api.openai.request import chat_messages
from servekit.gateway.api.openai.response_types import (
    Detokenized,
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    Tokens,
)
from servekit.gateway.api.openai.schema import (
    INT32,
    Inputs,
    Messages,
    TemplateArguments,
    Timeout,
    TokenId,
    decode,
)
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.http.asgi import encode_error
from servekit.gateway.http.request_limits import check_free
from servekit.gateway.http.response import Endpoint
from servekit.gateway.routing.preset_route import complete_chat
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.tool_parsing import check_tools
from servekit.protocol.messages import Delta, PoolingParams, SamplingParams
from servekit.protocol.types import Task

_encode = msgspec.json.Encoder().encode
#: The inputs of one request to a worker: enough to fill a batch, few enough to share a worker.
GROUP = 16
MAX_INPUTS = 2048

Input = str | list[int]
Value = TypeVar("Value")
_PLAIN = PoolingParams()


class EmbeddingRequest(msgspec.Struct):
    """Body of POST /v1/embeddings."""

    input: Annotated[Inputs, Meta(examples=[["one text", "another"]])]
    """A text or token ids, or up to 2048 of either; each has to fit into the model's context."""
    model: EmbeddingModel = ""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or base64 of float32, little-endian."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32 - 1)] | None = None
    """Cut inputs to this many tokens, with special tokens; -1: to as many as the model reads; 0:
    a text that is too long is refused, as it is by default. The beginning is kept."""
    dimensions: Annotated[int, Meta(ge=1, le=1048576)] | None = None
    """Size of the vectors: the first numbers of each, normalised to a unit vector."""
    user: Annotated[str, doc("Has no effect")] | None = None
    timeout_s: Timeout | None = None


class TokenizeRequest(msgspec.Struct):
    """Body of POST /tokenize: a prompt, or a conversation by the model's template."""

    model: ModelName = ""
    prompt: Annotated[str, doc("The text; either this or `messages`", "Hello world")] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_special_tokens: Annotated[bool, doc("false is refused")] | None = None
    add_generation_prompt: Annotated[bool, doc("false is refused")] | None = None


class DetokenizeRequest(msgspec.Struct):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=1048576, examples=[[19556, 905]])]
    """Token ids, each below the size of the model's vocabulary."""
    model: ModelName = ""


class EmbeddingCalls:
    """The calls of one HTTP request, which succeed or fail together."""

    def __init__(
        self, router: Router, calls: Sequence[InflightRequest], timeout_s: float | None
    ) -> None:
        self._calls = calls
        for call in calls:
            try:
                router.queue_call(call, timeout_s)
            except BaseException:
                self.cancel()
                raise

    def cancel(self) -> None:
        for call in self._calls:
            call.cancel()

    async def answers(self) -> list[Delta]:
        """Return the last delta of each call, in order. Raises RequestError and cancels the other
        calls.
        """
        try:
            return [await call.next_delta() for call in self._calls]
        finally:
            self.cancel()


class Vectors:
    """The embedding and tokenization endpoints, as ASGI routes by path."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        door = EndpointFactory(max_body_bytes, encode_error)
        self.routes: dict[str, Endpoint] = {
            "/v1/embeddings": door.calls(self._embed),
            "/tokenize": door.calls(self._tokenize),
            "/detokenize": door.calls(self._detokenize),
        }

    # ---- parsing each request

    def _embed(
        self, body: bytes, key: str
    ) -> tuple[EmbeddingCalls, Callable[[list[Delta]], bytes]]:
        request = decode(EmbeddingRequest, body)
        route = self._router.find(request.model)
        info, size = route.status.info, request.dimensions
        if size and info is not None and info.embedding_size and size > info.embedding_size:
            raise RequestError(
                f"dimensions: the vectors of {route.status.name!r} have {info.embedding_size}",
                param="dimensions",
            )
        inputs, most = list_inputs(request.input), request.truncate_prompt_tokens or 0
        calls = embedding_calls(request.model, key, inputs, most)
        asked = EmbeddingCalls(self._router, calls, request.timeout_s)
        return asked, lambda answers: _vectors(request, route.status.name, answers)

    def _tokenize(
        self, body: bytes, key: str
    ) -> tuple[EmbeddingCalls, Callable[[list[Delta]], bytes]]:
        request = decode(TokenizeRequest, body)
        route = self._router.find(request.model)
        info = route.status.info
        call = _call(request.model, key, task="tokenize")
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.add_special_tokens is False or request.add_generation_prompt is False:
            raise Unsupported(
                "add_special_tokens and add_generation_prompt: tokens are returned as a"
                " request has them, with both",
                param="add_special_tokens",
            )
        call.prompt = request.prompt
        if request.messages is not None:
            tools = check_tools(request.tools)
            call.messages, template = complete_chat(
                route, chat_messages(request.messages), request.chat_template_kwargs or {}
            )
            check_free(tools, template, None, self._router.access.rules.limits)
            call.more |= {"tools": tools} if tools else {}
            call.more |= {"template": template} if template else {}

        def encode_tokens(answers: list[Delta]) -> bytes:
            ids = answers[0].token_ids
            most = None if info is None else info.max_context
            return _encode(Tokens(len(ids), most, ids))

        return EmbeddingCalls(self._router, [call], None), encode_tokens

    def _detokenize(
        self, body: bytes, key: str
    ) -> tuple[EmbeddingCalls, Callable[[list[Delta]], bytes]]:
        request = decode(DetokenizeRequest, body)
        call = _call(request.model, key, task="detokenize")
        call.prompt = request.tokens
        asked = EmbeddingCalls(self._router, [call], None)
        return asked, lambda answers: _encode(Detokenized(answers[0].text))


def embedding_calls(
    model: str, key: str, inputs: Sequence[Input], most_tokens: int = 0
) -> list[InflightRequest]:
    """Return the requests that compute the vectors of all inputs, in order.

    `most_tokens` is `SamplingParams.truncate_prompt`.
    """
    params = SamplingParams(truncate_prompt=most_tokens)
    return pooled_calls(model, key, "embed", params, inputs)


def pooled_calls(
    model: str,
    key: str,
    task: Task,
    params: SamplingParams,
    inputs: Sequence[Input],
    asked: PoolingParams = _PLAIN,
) -> list[InflightRequest]:
    """Return the requests to embed or classify all inputs, in order."""
    return [
        InflightRequest(
            *(model, params),
            stream=False,
            key=key,
            more={"task": task, "inputs": [*group], "pooling": replace(asked, first=at)},
        )
        for at, group in split_groups(inputs)
    ]


def _call(model: str, key: str, **more: Any) -> InflightRequest:
    return InflightRequest(model, SamplingParams(), stream=False, key=key, more=more)


def list_inputs(given: str | list[int | str | list[int]]) -> list[Input]:
    """Return the inputs of a request. Raises RequestError."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [cast(list[int], given)]
    if len(kinds) > 1:
        raise RequestError("input: text and token ids are mixed in one list", param="input")
    if len(given) > MAX_INPUTS:
        raise RequestError(
            f"input: {len(given)} are over the limit of {MAX_INPUTS} inputs in one request",
            param="input",
        )
    for at, one in enumerate(given):
        if not one:
            raise RequestError(f"input[{at}] is empty", param="input")
    return cast(list[Input], given)


def split_groups(inputs: Sequence[Value]) -> Iterator[tuple[int, Sequence[Value]]]:
    """Yield the inputs of each request to a worker, and the place of the first."""
    for at in range(0, len(inputs), GROUP):
        yield at, inputs[at : at + GROUP]


def _vectors(request: EmbeddingRequest, model: str, answers: list[Delta]) -> bytes:
    """Return OpenAI's answer; vectors are float32, as numbers or as base64 of their bytes."""
    raw = [vector for answer in answers for vector in answer.vectors]
    if request.dimensions is not None:
        raw = [shortened(vector, request.dimensions) for vector in raw]
    base = request.encoding_format == "base64"
    data = [
        Embedding(
            "embedding", index, base64.b64encode(vector).decode() if base else numbers(vector)
        )
        for index, vector in enumerate(raw)
    ]
    used = sum(answer.prompt_tokens for answer in answers)
    return _encode(EmbeddingList("list", data, model, EmbeddingUsage(used, used)))


def numbers(vector: bytes) -> list[float]:
    """Return the numbers of a little-endian float32 vector."""
    return array.array("f", vector).tolist()


def shortened(vector: bytes, size: int) -> bytes:
    """Return the first `size` numbers of a vector, normalised to a unit vector."""
    first = array.array("f", vector)[:size]
    length = math.sqrt(math.fsum(value * value for value in first)) or 1.0
    return array.array("f", (value / length for value in first)).tobytes()


OPERATIONS = (
    Operation("/v1/embeddings", "Embeddings", EmbeddingRequest, EmbeddingList),
    Operation(
        "/tokenize",
        "The tokens of a prompt, or of a conversation by the model's template",
        TokenizeRequest,
        Tokens,
        tag="tokens",
    ),
    Operation("/detokenize", "The text of tokens", DetokenizeRequest, Detokenized, tag="tokens"),
)
