"""Parsing of an endpoint's embeddings."""

from __future__ import annotations

import array
import base64
import binascii
import math
from typing import Any

import msgspec

from servekit.engines.remote.errors import told_in_answer, wrong_answer
from servekit.engines.remote.schemas import Usage
from servekit.engines.remote.schemas import valid_count as counted


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
    except (msgspec.MsgspecError, RecursionError) as error:
        raise wrong_answer(f"{error}, in {data[:80].decode(errors='replace')!r}") from None
    if answer.error:
        raise told_in_answer(answer.error)
    order = {place: one for at, one in enumerate(answer.data) if (place := _place_of(one, at)) >= 0}
    if sorted(order) != list(range(count)):
        raise wrong_answer(f"it has {len(answer.data)} embeddings for {count} inputs")
    found = [_parse_vector(order[at].embedding) for at in range(count)]
    if len(set(map(len, found))) > 1 or not found[0] or len(found[0]) % 4:
        raise wrong_answer("its embeddings differ in length, or have none")
    return found, None if answer.usage is None else counted(answer.usage.prompt_tokens)


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
        raise wrong_answer("one of its embeddings is none") from None
