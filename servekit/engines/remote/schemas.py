"""JSON schemas of completions, whole or streamed, and of embeddings, as lenient as possible."""

from __future__ import annotations

import array
import base64
import binascii
import math
from typing import Any

import msgspec

from servekit.engines.remote.errors import told_in_answer, wrong_answer
from servekit.protocol.messages import TokenLogprob

#: Larger counts are invalid.
_MOST_TOKENS = 2**40


class Usage(msgspec.Struct):
    """Token counts. Invalid ones must not lose an answer, so their users validate them."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None

    @property
    def cached_tokens(self) -> int:
        """Return the tokens of the prompt that came from a cache; 0 if that is not known."""
        details = self.prompt_tokens_details
        told = details.get("cached_tokens") if isinstance(details, dict) else None
        return valid_count(told) or 0


class Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class Called(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: Function | None = None


class Said(msgspec.Struct):
    """A stream's `delta`, or a whole answer's `message`."""

    content: str | list[Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the same in some endpoints; an object in others
    tool_calls: list[Called] | None = None


class Choice(msgspec.Struct):
    index: int | None = None
    delta: Said | None = None
    message: Said | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM and servekit: the stop string that ended the answer
    logprobs: Any = None


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_chunks = msgspec.json.Decoder(Chunk)


def valid_count(told: Any) -> int | None:
    """Return a count of tokens; None if it is invalid."""
    return told if type(told) is int and 0 <= told < _MOST_TOKENS else None


def decode_chunk(data: bytes) -> Chunk:
    """Decode a chunk. Raises EndpointFailed, also for an error object instead of an answer."""
    try:
        chunk = _chunks.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise wrong_answer(f"{error}, in {data[:80].decode(errors='replace')!r}") from None
    if chunk.error:
        raise told_in_answer(chunk.error)
    return chunk


def convert_logprobs(given: Any) -> list[TokenLogprob]:
    """Convert log probabilities of a chat or plain completion. Raises EndpointFailed."""
    try:
        if given.get("content") is not None:
            return [_chat_logprob(one) for one in given["content"]]
        if given.get("tokens") is None:
            return []
        best = given.get("top_logprobs") or [None] * len(given["tokens"])
        rows = zip(given["tokens"], given["token_logprobs"], best, strict=True)
        return [_plain_scored(*row) for row in rows]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise wrong_answer("its log probabilities have an unknown form") from None


def _chat_logprob(one: dict[str, Any]) -> TokenLogprob:
    best = tuple(
        (_token_bytes(top), _finite_number(top["logprob"])) for top in one.get("top_logprobs") or ()
    )
    return TokenLogprob(_token_bytes(one), _finite_number(one["logprob"]), best)


def _token_bytes(one: dict[str, Any]) -> bytes:
    raw = one.get("bytes")
    # `[*raw]`, as bytes of a number are as many zeros
    return bytes([*raw]) if raw is not None else one["token"].encode()


def _finite_number(given: Any) -> float:
    if not math.isfinite(number := float(given)):  # JSON has no NaN: clients would read null
        raise ValueError
    return number


def _plain_scored(token: str, logprob: float | None, best: dict[str, float] | None) -> TokenLogprob:
    ranked = tuple((text.encode(), _finite_number(value)) for text, value in (best or {}).items())
    return TokenLogprob(token.encode(), _finite_number(logprob or 0.0), ranked)


# ---------------------------------------------------------------- embeddings


class Embedded(msgspec.Struct):
    embedding: list[float] | str
    index: int | None = None


class Embeddings(msgspec.Struct):
    data: list[Embedded] = []
    usage: Usage | None = None
    error: Any = None


_embeddings = msgspec.json.Decoder(Embeddings)


def parse_vectors(data: bytes, count: int) -> tuple[list[bytes], int | None]:
    """Return the vectors of `count` inputs, float32 little-endian, and their number of tokens.

    The number is None if the endpoint does not report it. Raises EndpointFailed.
    """
    try:
        answer = _embeddings.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise wrong_answer(f"{error}, in {data[:80].decode(errors='replace')!r}") from None
    if answer.error:
        raise told_in_answer(answer.error)
    order = {place: one for at, one in enumerate(answer.data) if (place := _place_of(one, at)) >= 0}
    if sorted(order) != list(range(count)):
        raise wrong_answer(f"it has {len(answer.data)} embeddings for {count} inputs")
    found = [_parse_vector(order[at].embedding) for at in range(count)]
    if len(set(map(len, found))) > 1 or not found[0] or len(found[0]) % 4:
        raise wrong_answer("its embeddings differ in length, or have none")
    return found, None if answer.usage is None else valid_count(answer.usage.prompt_tokens)


def _place_of(one: Embedded, at: int) -> int:
    return at if one.index is None else one.index


def _parse_vector(given: list[float] | str) -> bytes:
    try:
        decoded = base64.b64decode(given, validate=True) if isinstance(given, str) else given
        numbers = array.array("f", decoded)
        if not all(map(math.isfinite, numbers)):
            raise ValueError
        return numbers.tobytes()
    except (binascii.Error, OverflowError, ValueError):
        raise wrong_answer("one of its embeddings is missing") from None
