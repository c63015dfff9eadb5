"""The first words with an endpoint: whether it is there, has the model, and how it is to be asked.

`GET /models` says what it can of the model, where there is such a list. Then it is asked for a few
tokens, or for an embedding: in the words that most know, and if it refuses those, in others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from servekit.engines.remote.client import Address, Endpoint
from servekit.engines.remote.embeddings import vectors
from servekit.engines.remote.errors import Refused
from servekit.engines.remote.rate_limiter import RateLimiter
from servekit.engines.remote.reader import read
from servekit.engines.remote.request_builder import EndpointTraits, Errand, Limit, errand
from servekit.engines.remote.response_parser import Answer
from servekit.errors import LoadError, RequestError
from servekit.protocol.messages import ChatMessage, Generate, SamplingParams

#: Models that think want more than a token or two, or say that it was not enough.
_TOKENS = 16
_MOST_CHARS = 2**20
#: Of a list of models: some have hundreds.
_MOST_LIST_BYTES = 4 * 2**20
_HELLO = "Say hello."
#: How a list of models says how long a context is: vLLM and servekit; OpenRouter; Mistral; Groq.
_CONTEXTS = ("max_model_len", "context_length", "max_context_length", "context_window")
_UNAUTHORISED = (401, 403)
_MISUNDERSTOOD = (400, 422)


@dataclass(frozen=True, slots=True)
class Greeted:
    """What the first words have shown."""

    manner: EndpointTraits
    lists: bool  # it has GET /models
    max_context: int  # tokens; 0: it does not say
    embedding_size: int


async def greet(
    address: Address, manner: EndpointTraits, key_name: str, *, embeds: bool
) -> Greeted:
    """Raises LoadError; permanent where the file or the key has to be changed."""
    endpoint = Endpoint(address, RateLimiter(None, None))
    try:
        listed = await _list(endpoint)
        context = 0 if listed is None else _context(listed, manner.model)
        manner, size = await _ask(endpoint, manner, embeds=embeds)
        return Greeted(manner, listed is not None, context, size)
    except Refused as refusal:
        raise _load_error(refusal, key_name, address.key) from None
    except RequestError as error:
        raise LoadError(error.message, permanent=False) from None
    finally:
        await endpoint.close()


def greeting(manner: EndpointTraits, *, embeds: bool) -> Errand:
    """A request that costs next to nothing."""
    if embeds:
        return errand(Generate(0, SamplingParams(), task="embed", inputs=["hello"]), manner)
    params = SamplingParams(max_tokens=_TOKENS)
    neutral = replace(manner, defaults={})
    return errand(Generate(0, params, messages=[ChatMessage("user", _HELLO)]), neutral)


async def _list(endpoint: Endpoint) -> list[Any] | None:
    """The models that it lists; None where it has no list. Raises Refused if it is not there."""
    status, body = await endpoint.get("/models", _MOST_LIST_BYTES)
    if status != 200:
        return None
    try:
        listed = msgspec.json.decode(body)["data"]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return None
    return listed if isinstance(listed, list) else None


def _context(listed: list[Any], model: str) -> int:
    for one in listed:
        if isinstance(one, dict) and one.get("id") == model:
            found = (one.get(name) for name in _CONTEXTS)
            return next((n for n in found if isinstance(n, int) and 16 <= n < 2**31), 0)
    return 0


async def _ask(
    endpoint: Endpoint, manner: EndpointTraits, *, embeds: bool
) -> tuple[EndpointTraits, int]:
    """In which manner it answers, and the size of its embeddings. Raises Refused."""
    first: Refused | None = None
    for other in _manners(manner, embeds=embeds):
        try:
            return other, await _hear(endpoint, greeting(other, embeds=embeds))
        except Refused as refusal:
            if refusal.status not in _MISUNDERSTOOD:
                raise
            first = first or refusal
    assert first is not None
    raise first


def _manners(manner: EndpointTraits, *, embeds: bool) -> Iterator[EndpointTraits]:
    """As most have it; as OpenAI's newer models want it; for those that know of no counts."""
    if embeds:
        yield manner
        return
    limits: tuple[Limit, ...] = ("max_tokens", "max_completion_tokens")
    for usage, limit in itertools.product((True, False), limits):
        yield replace(manner, usage=usage, limit=limit)


async def _hear(endpoint: Endpoint, task: Errand) -> int:
    async with endpoint.ask(task, patient=False) as reply:
        if task.request.task == "embed":
            found, _ = vectors(await reply.whole(), 1)
            return len(found[0]) // 4
        answer = Answer(task.request, 0, _MOST_CHARS)
        await read(reply, answer, lambda: None)
        return 0


def _load_error(refusal: Refused, key_name: str, key: str) -> LoadError:
    said = refusal.error.message
    if refusal.status in _UNAUTHORISED:
        hint = f"the key in the variable {key_name}" if key else "`key_environment` names none"
        return LoadError(f"{said}; it does not take {hint}" if key else f"{said}; {hint}")
    permanent = not refusal.again and refusal.status != 429
    return LoadError(said, permanent=permanent)
