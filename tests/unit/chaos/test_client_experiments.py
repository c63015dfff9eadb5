"""What experiments with clients count, and how many clients they may be."""

from __future__ import annotations

import resource
from dataclasses import replace as replace_fields
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.chaos import client_experiments as experiments
from servekit.chaos.baseline_answers import BaselineAnswer, learn_answers
from servekit.chaos.client import ChatAnswer, Client, Question
from servekit.chaos.load import Load
from servekit.chaos.result import ExperimentContext
from servekit.chaos.target import Target
from servekit.errors import ServekitError
from servekit.protocol.messages import ModelInfo
from tests.unit.chaos.test_client import GOOD, QUESTION, server
from tests.unit.cli.instance import listening, make_model, make_replica, make_status

INFO = ModelInfo(4096, 8, True, "echo", "none", "cpu")


def answer(began: float, first: float | None, ended: float) -> BaselineAnswer:
    found = ChatAnswer(began, first_s=first, ended_s=ended)
    return BaselineAnswer(Question("m", "hello", 16), found, True)


def context(folder: Path, *known: BaselineAnswer) -> ExperimentContext:
    target = Target("http://127.0.0.1:1", folder, make_status(), "m", "no-such-mark")
    return ExperimentContext(target, known or (answer(1.0, 1.25, 3.0),))


@pytest.mark.parametrize(
    ("given", "figures"),
    [
        (ChatAnswer(0.0, status=429, retry_after_s=1.0), (0, 1, 0)),
        (ChatAnswer(0.0, status=429), (0, 1, 1)),
        (ChatAnswer(0.0, status=429, retry_after_s=0.0), (0, 1, 1)),
        (ChatAnswer(0.0, status=200, finishes=["stop"], ids={"x"}), (1, 0, 0)),
    ],
)
def test_a_crowd_is_answered_or_refused_with_a_time(
    given: ChatAnswer, figures: tuple[int, int, int]
) -> None:
    crowd = experiments._Flood(Client("http://127.0.0.1:1"))
    crowd._count(given)
    assert (crowd.answered, crowd.refused, crowd.unsaid) == figures
    assert crowd.others == set()


def test_any_other_answer_of_the_crowd_is_named() -> None:
    crowd = experiments._Flood(Client("http://127.0.0.1:1"))
    crowd._count(ChatAnswer(0.0, status=503))
    assert crowd.others == {"status 503"} and crowd.answered == 0


def test_no_more_clients_than_files_may_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert experiments._within_limits(0) == 1
    assert experiments._within_limits(7) == 7
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        assert experiments._within_limits(5000) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= 2000:
        assert experiments._within_limits(5000) == 1000


def test_the_time_to_the_first_chunk_is_the_median(tmp_path: Path) -> None:
    known = answer(1.0, 1.25, 3.0), answer(1.0, 1.5, 3.0), answer(1.0, None, 3.0)
    assert experiments._first_s(context(tmp_path, *known)) == 0.5
    assert experiments._first_s(context(tmp_path, known[2])) == 2.0, "an answer in one piece"


async def test_a_long_question_fits_the_context(tmp_path: Path) -> None:
    scene = context(tmp_path)
    for length, tokens in ((512, 502), (100_000, 2000), (8, 16)):
        info = replace_info(length)
        status = make_status(replace(make_model("m"), info=info))
        with listening(tmp_path, lambda message: None, status):
            long = await experiments._long_question(scene)
        assert (long.model, long.max_tokens) == ("m", tokens)
        assert long.text != "hello"
    with listening(tmp_path, lambda message: None):
        assert (await experiments._long_question(scene)).max_tokens == 1990


def replace_info(max_context: int) -> ModelInfo:
    return replace(INFO, max_context=max_context)


async def test_an_engine_is_idle_once_its_own_workers_are(tmp_path: Path) -> None:
    busy = replace(make_replica("m/0"), running=1)
    waiting = replace(make_replica("m/0"), waiting=1)
    other = make_model("n", replace(make_replica("n/0"), running=1))
    news = [make_status(make_model("m", one), other) for one in (busy, waiting, make_replica())]
    with listening(tmp_path, lambda message: None, lambda: news.pop(0)):
        assert await experiments._engine_idle(context(tmp_path))
    assert news == []


async def test_streams_that_begin_are_counted() -> None:
    async with server(GOOD) as url:
        client = Client(url)
        exchanges = [await client.send_request(QUESTION, stream=True) for _ in range(3)]
        assert await experiments._count_started(exchanges, within_s=10.0) == 3
        known = [replace_fields(answer(0.0, 0.0, 0.0), question=QUESTION, sure=False)]
        async with Load(client, known, streams=2) as load:
            assert await experiments._first_chunks(load, 2) is not None
    assert await experiments._count_started([], within_s=0.0) == 0


async def test_one_key_is_not_enough_for_a_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVEKIT_API_KEY", "sk-mine")
    scene = context(tmp_path)
    assert b"Bearer sk-mine" in scene.target.client.build_request(QUESTION, stream=True)
    assert (await experiments.flood(scene)).verdict == "skipped"


async def test_an_instance_with_keys_tells_where_to_put_one() -> None:
    body = b'{"error":{"message":"no","code":"invalid_api_key"}}'
    head = b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with server(head + body) as url:
        with pytest.raises(ServekitError, match="SERVEKIT_API_KEY"):
            await learn_answers(Client(url), [QUESTION])
