"""JSON schemas of chat and plain completions, whole or streamed, as lenient as possible."""

from __future__ import annotations

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
    except (msgspec.MsgspecError, RecursionError) as error:
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
        raise wrong_answer("its log probabilities have no form that is known") from None


def _chat_logprob(one: dict[str, Any]) -> TokenLogprob:
    best = tuple(
        (_token_bytes(top), float(top["logprob"])) for top in one.get("top_logprobs") or ()
    )
    return TokenLogprob(_token_bytes(one), float(one["logprob"]), best)


def _token_bytes(one: dict[str, Any]) -> bytes:
    raw = one.get("bytes")
    return bytes(raw) if raw is not None else one["token"].encode()


def _plain_scored(token: str, logprob: float | None, best: dict[str, float] | None) -> TokenLogprob:
    ranked = tuple((text.encode(), float(value)) for text, value in (best or {}).items())
    return TokenLogprob(token.encode(), float(logprob or 0.0), ranked)
