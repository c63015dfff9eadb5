"""The first words with an endpoint, and what is learned of them."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engines.remote.handshake import EndpointFacts, greet_endpoint
from servekit.engines.remote.request_builder import EndpointTraits
from servekit.errors import LoadError
from tests.unit.engines.remote.liar import (
    Script,
    dropped,
    listing,
    lying,
    said,
    status,
    stream,
    whole,
)
from tests.unit.engines.remote.test_client import address

MANNER = EndpointTraits("kimi", {"temperature": 0.3, "max_tokens": 9999})


async def greeted(url: str, *, embeds: bool = False, **fields: Any) -> EndpointFacts:
    return await greet_endpoint(address(url, **fields), MANNER, "KIMI_KEY", embeds=embeds)


async def test_a_few_tokens_and_nothing_that_it_may_not_know() -> None:
    async with lying() as liar:
        found = await greeted(liar.url)
        assert (found.traits, found.lists, found.max_context) == (MANNER, True, 0)
        [asked] = liar.greetings
        assert asked.body.keys() == {"model", "messages", "stream", "stream_options", "max_tokens"}
        assert asked.body["max_tokens"] <= 16


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"max_model_len": 4096}, 4096),
        ({"context_length": 8192}, 8192),
        ({"max_model_len": None, "context_window": 2048}, 2048),
        ({"max_model_len": -1}, 0),
        ({"max_model_len": "long"}, 0),
        ({"max_model_len": 2**40}, 0),
        ({"meta": {"n_ctx": 2048}}, 2048),
        ({}, 0),
    ],
)
async def test_what_the_list_says_of_the_context(told: dict[str, Any], expected: int) -> None:
    async with lying() as liar:
        liar.models = listing({"id": "other", "max_model_len": 77}, {"id": "kimi", **told})
        assert (await greeted(liar.url)).max_context == expected


@pytest.mark.parametrize(
    "models",
    [status(404), status(405), status(500), whole(b"<html>", "text/html"), whole(b"[]"),
     whole(b'{"data": 7}'), whole(b"[" * 100_000)],
)  # fmt: skip
async def test_who_has_no_list_may_answer_all_the_same(models: Script) -> None:
    async with lying() as liar:
        liar.models = models
        assert (await greeted(liar.url)).lists is False


async def test_it_is_asked_in_its_own_manner() -> None:
    async with lying() as liar:
        liar.greets += [status(400, "use max_completion_tokens")]
        found = await greeted(liar.url)
        assert (found.traits.limit, found.traits.usage) == ("max_completion_tokens", True)
        liar.greets += [status(422, "stream_options?")] * 2
        found = await greeted(liar.url)
        assert (found.traits.limit, found.traits.usage) == ("max_tokens", False)
        assert "stream_options" not in liar.greetings[-1].body


async def test_what_it_does_not_take_in_any_manner_is_told_in_its_first_words() -> None:
    async with lying() as liar:
        liar.greets.extend([status(400, "first"), *[status(400, "later")] * 9])
        with pytest.raises(LoadError, match="first") as told:
            await greeted(liar.url)
        assert told.value.permanent
        assert len(liar.greetings) == 4


@pytest.mark.parametrize(
    ("script", "permanent", "words"),
    [
        (
            status(401, "bad key"),
            True,
            "bad key; it does not accept the key in the variable KIMI_KEY",
        ),
        (status(403, "not you"), True, "KIMI_KEY"),
        (status(404, "no such model"), True, "answered 404: no such model"),
        (status(301, location="https://x.example"), True, "redirects to"),
        (status(429, "slowly"), False, "slowly"),
        (status(500, "broken"), False, "broken"),
        (status(503, "loading"), False, "loading"),
        (dropped(), False, "does not answer"),
        (stream(ends=True), False, "without an answer"),
        (whole(b"hello", "text/plain"), False, "not a stream of events"),
    ],
)
async def test_why_it_does_not_serve(script: Script, permanent: bool, words: str) -> None:
    async with lying() as liar:
        liar.greets += [script]
        with pytest.raises(LoadError, match=words) as told:
            await greeted(liar.url)
        assert told.value.permanent == permanent


async def test_a_key_is_asked_for_where_the_file_names_none() -> None:
    async with lying() as liar:
        liar.greets += [status(401, "who are you?")]
        with pytest.raises(LoadError, match=r"who are you.*`key_environment` names none"):
            await greeted(liar.url, key="")


async def test_nobody_there_is_asked_for_nothing() -> None:
    async with lying() as liar:
        url = liar.url
    with pytest.raises(LoadError, match="does not answer") as told:
        await greeted(url)
    assert not told.value.permanent


async def test_one_that_embeds() -> None:
    answer = whole(b'{"data": [{"index": 0, "embedding": [1, 2, 3]}]}')
    async with lying() as liar:
        liar.answers += [answer]
        assert (await greeted(liar.url, embeds=True)).embedding_size == 3
        assert liar.asked[0].path == "/v1/embeddings"
        liar.answers += [said("no vectors")]
        with pytest.raises(LoadError, match="answer is wrong"):
            await greeted(liar.url, embeds=True)
