from __future__ import annotations

import array
import base64
import json
from typing import Any

import pytest

from servekit.engines.remote.schemas import parse_vectors
from servekit.errors import EndpointFailed


def raw(*numbers: float) -> bytes:
    return array.array("f", numbers).tobytes()


def data(*embeddings: Any, **more: Any) -> bytes:
    listed = [{"object": "embedding", "embedding": one} for one in embeddings]
    return json.dumps({"object": "list", "data": listed, **more}).encode()


def test_as_numbers_and_as_base64_in_their_own_order() -> None:
    coded = base64.b64encode(raw(3, 4)).decode()
    assert parse_vectors(data([1, 2.5], coded), 2) == ([raw(1, 2.5), raw(3, 4)], None)
    listed = [{"index": 1, "embedding": [1]}, {"index": 0, "embedding": [2]}]
    body = json.dumps({"data": listed, "usage": {"prompt_tokens": 5, "total_tokens": 5}})
    assert parse_vectors(body.encode(), 2) == ([raw(2), raw(1)], 5)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 1),
        (b"[]", 1),
        (b"{}", 1),
        (data([1], [2]), 1),
        (data([1]), 2),
        (data([1], [1, 2]), 2),
        (data([]), 1),
        (data("***"), 1),
        (data("AAA="), 1),
        (data(["x"]), 1),
        (data([1e300]), 1),
        (json.dumps({"data": [{"index": 7, "embedding": [1]}]}).encode(), 1),
        (json.dumps({"data": [{"index": -1, "embedding": [1]}]}).encode(), 1),
        (json.dumps({"error": {"message": "no"}}).encode(), 1),
    ],
)
def test_lies(body: bytes, count: int) -> None:
    with pytest.raises(EndpointFailed):
        parse_vectors(body, count)
