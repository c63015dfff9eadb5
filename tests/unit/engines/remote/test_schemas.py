"""Log probabilities, as chats and plain completions have them."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engines.remote.schemas import convert_logprobs, decode_chunk, parse_vectors
from servekit.errors import EndpointFailed
from servekit.protocol.messages import TokenLogprob


def test_of_a_chat() -> None:
    best = [{"token": "a", "logprob": -1, "bytes": [97]}, {"token": "ä", "logprob": -2.5}]
    given = {"content": [{"token": "?", "bytes": [195], "logprob": -1, "top_logprobs": best}]}
    assert convert_logprobs(given) == [
        TokenLogprob(b"\xc3", -1.0, ((b"a", -1.0), ("ä".encode(), -2.5)))
    ]
    assert convert_logprobs({"content": []}) == convert_logprobs({"content": None}) == []


def test_of_a_plain_completion() -> None:
    given: dict[str, Any] = {"tokens": ["a", "b"], "token_logprobs": [None, -0.5]}
    assert convert_logprobs(given) == [TokenLogprob(b"a", 0.0), TokenLogprob(b"b", -0.5)]
    given["top_logprobs"] = [None, {"c": -3}]
    assert convert_logprobs(given)[1].best == ((b"c", -3.0),)


@pytest.mark.parametrize(
    "given",
    [7, [], "x", {"content": 7}, {"content": [7]}, {"content": [{"token": "a"}]},
     {"content": [{"token": 7, "logprob": 0}]}, {"content": [{"bytes": [300], "logprob": 0}]},
     {"content": [{"bytes": 7, "logprob": 0}]}, {"content": [{"token": "a", "logprob": "nan"}]},
     {"tokens": ["a"]}, {"tokens": ["a"], "token_logprobs": []},
     {"tokens": ["a"], "token_logprobs": ["x"]}, {"tokens": [7], "token_logprobs": [0]}],
)  # fmt: skip
def test_what_has_no_known_form(given: Any) -> None:
    with pytest.raises(EndpointFailed, match="log probabilities"):
        convert_logprobs(given)


def test_more_than_is_known_is_passed_over() -> None:
    data = b'{"id": "x", "choices": [], "usage": null, "provider": {"name": [1]}}'
    assert decode_chunk(data).choices == []


def test_bytes_that_are_no_text_are_named() -> None:
    with pytest.raises(EndpointFailed, match="can't decode byte 0xff"):
        decode_chunk(b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}')
    with pytest.raises(EndpointFailed, match="can't decode byte 0xff"):
        parse_vectors(b'{"data": [{"embedding": "\xff"}]}', 1)
