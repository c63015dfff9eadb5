"""The handshake with an endpoint: whether it answers, has the model, and which parameters it takes.

`GET /models`, if it exists, tells properties of the model. Then a request for a few tokens or an
embedding is sent: with the most common parameters, and if these are refused, with others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from servekit.engines.remote.client import Address, Endpoint
from servekit.engines.remote.errors import Refused
from servekit.engines.remote.rate_limiter import RateLimiter
from servekit.engines.remote.reader import read_reply
from servekit.engines.remote.request_builder import (
    EndpointCall,
    EndpointTraits,
    Limit,
    build_call,
)
from servekit.engines.remote.response_parser import ResponseParser
from servekit.engines.remote.schemas import parse_vectors
from servekit.errors import LoadError, RequestError
from servekit.protocol.messages import ChatMessage, Generate, SamplingParams

#: Reasoning models need more than a token or two, or report that the limit was too low.
_TOKENS = 16
_MOST_CHARS = 2**20
#: Limit of a list of models, which may have hundreds.
_MOST_LIST_BYTES = 4 * 2**20
_HELLO = "Say hello."
#: Names of the context length in lists of models: vLLM and servekit; OpenRouter; Mistral; Groq;
#: llama-server, within `meta`.
_CONTEXTS = ("max_model_len", "context_length", "max_context_length", "context_window", "n_ctx")
_UNAUTHORISED = (401, 403)
_MISUNDERSTOOD = (400, 422)


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """The result of a handshake."""

    traits: EndpointTraits
    lists: bool  # the endpoint has GET /models
    max_context: int  # tokens; 0: not reported
    embedding_size: int


async def greet_endpoint(
    address: Address, traits: EndpointTraits, key_name: str, *, embeds: bool
) -> EndpointFacts:
    """Run the handshake. Raises LoadError, permanent if the configuration or the key is wrong."""
    endpoint = Endpoint(address, RateLimiter(None, None))
    try:
        listed = await list_models(endpoint)
        context = 0 if listed is None else find_context(listed, traits.model)
        traits, size = await try_traits(endpoint, traits, embeds=embeds)
        return EndpointFacts(traits, listed is not None, context, size)
    except Refused as refusal:
        raise to_load_error(refusal, key_name, address.key) from None
    except RequestError as error:
        raise LoadError(error.message, permanent=False) from None
    finally:
        await endpoint.close()


def make_greeting(traits: EndpointTraits, *, embeds: bool) -> EndpointCall:
    """Return a request that costs next to nothing."""
    if embeds:
        return build_call(Generate(0, SamplingParams(), task="embed", inputs=["hello"]), traits)
    params = SamplingParams(max_tokens=_TOKENS)
    neutral = replace(traits, defaults={})
    return build_call(Generate(0, params, messages=[ChatMessage("user", _HELLO)]), neutral)


async def list_models(endpoint: Endpoint) -> list[Any] | None:
    """Return the listed models; None if there is no list. Raises Refused if it is unreachable."""
    status, body = await endpoint.get("/models", _MOST_LIST_BYTES)
    if status != 200:
        return None
    try:
        listed = msgspec.json.decode(body)["data"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None
    return listed if isinstance(listed, list) else None


def find_context(listed: list[Any], model: str) -> int:
    for one in listed:
        if isinstance(one, dict) and one.get("id") == model:
            meta = one.get("meta")
            told = {**one, **meta} if isinstance(meta, dict) else one
            found = (told.get(name) for name in _CONTEXTS)
            return next((n for n in found if isinstance(n, int) and 16 <= n < 2**31), 0)
    return 0


async def try_traits(
    endpoint: Endpoint, traits: EndpointTraits, *, embeds: bool
) -> tuple[EndpointTraits, int]:
    """Return the parameters that work, and the size of embeddings. Raises Refused."""
    first: Refused | None = None
    for other in _list_traits(traits, embeds=embeds):
        try:
            return other, await _hear_answer(endpoint, make_greeting(other, embeds=embeds))
        except Refused as refusal:
            if refusal.status not in _MISUNDERSTOOD:
                raise
            first = first or refusal
    assert first is not None
    raise first


def _list_traits(traits: EndpointTraits, *, embeds: bool) -> Iterator[EndpointTraits]:
    """Yield parameter sets: the common one, OpenAI's newer one, and both without usage counts."""
    if embeds:
        yield traits
        return
    limits: tuple[Limit, ...] = ("max_tokens", "max_completion_tokens")
    for usage, limit in itertools.product((True, False), limits):
        yield replace(traits, usage=usage, limit=limit)


async def _hear_answer(endpoint: Endpoint, task: EndpointCall) -> int:
    async with endpoint.send_call(task, patient=False) as reply:
        if task.request.task == "embed":
            found, _ = parse_vectors(await reply.read_all(), 1)
            return len(found[0]) // 4
        answer = ResponseParser(task.request, 0, _MOST_CHARS)
        await read_reply(reply, answer, lambda: None)
        return 0


def to_load_error(refusal: Refused, key_name: str, key: str) -> LoadError:
    said = refusal.error.message
    if refusal.status in _UNAUTHORISED:
        hint = f"the key in the variable {key_name}" if key else "`key_environment` names none"
        return LoadError(f"{said}; it does not accept {hint}" if key else f"{said}; {hint}")
    permanent = not refusal.again and refusal.status != 429
    return LoadError(said, permanent=permanent)
