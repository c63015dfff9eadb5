"""Two ranks say of images and recordings what the library's own `generate` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.unit.engines.harness import Seeing
from tests.unit.engines.seeing_model import LIBRARY
from tests.unit.engines.transformers.tensor_parallel.conftest import MEDIA_WRITERS
from tests.unit.engines.transformers.vision import test_engine_recordings as recordings
from tests.unit.engines.transformers.vision.pictures import (
    HISTORY,
    NONE,
    ONE,
    OTHER,
    RED,
    Reference,
    say,
)

Folders = Callable[[str], Path]
Opened = Callable[..., AbstractContextManager[Seeing]]

#: How images, or else recordings, run.
PLACES = {"gemma3": "one at a time: its decoder takes attention_mask", "qwen2_audio": "as texts"}
HEARD = [recordings.ONE, recordings.OTHER, NONE, recordings.HISTORY, recordings.ONE]
SEEN = [ONE, OTHER, NONE, HISTORY, ONE, NONE, OTHER]
BOTH = [say("user", RED, recordings.LOW, "What is this?")]
ASKED = {"omni": [*SEEN, *HEARD, BOTH], "qwen2_audio": HEARD}
TOKENS = Seeing.TOKENS

lane = pytest.mark.lane("tensor-parallel")


@pytest.fixture(scope="module", params=list(MEDIA_WRITERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def spread(name: str, media_model: Folders, two_ranks: Opened) -> Iterator[Seeing]:
    if name == "qwen3_vl" and LIBRARY.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 has no plan for it")
    with two_ranks(media_model(name), kind=Seeing) as engine:
        yield engine


@pytest.fixture(scope="module")
def due(name: str, references: Callable[[str], Reference]) -> list[list[int]]:
    return [references(name).ask(messages, TOKENS)[1] for messages in ASKED.get(name, SEEN)]


@lane
def test_media_and_texts_at_once_are_the_library_s(
    spread: Seeing, name: str, due: list[list[int]]
) -> None:
    jobs = [spread.ask(messages) for messages in ASKED.get(name, SEEN)]
    assert [spread.tokens(job) for job in jobs] == due
    assert PLACES.get(name, "in the batch") in spread.info.detail
    assert "tensor parallel, 2 ranks" in spread.info.detail


@lane
def test_each_alone_is_the_same(spread: Seeing, name: str, due: list[list[int]]) -> None:
    """What another worker has begun goes on, and sampled answers depend on the seed alone."""
    asked = ASKED.get(name, SEEN)
    assert [spread.answer(messages) for messages in asked[:3]] == due[:3]
    assert spread.answer(asked[3], emitted=due[3][:7]) == due[3][7:]
    wild = {"temperature": 1.2, "seed": 3}
    drawn = spread.answer(asked[1], **wild)
    jobs = [spread.ask(asked[1], **wild), spread.ask(asked[3]), spread.ask(asked[2])]
    assert [spread.tokens(job) for job in jobs] == [drawn, due[3], due[2]]


@lane
def test_cancelled_ones_leave_the_ranks_in_step(
    spread: Seeing, name: str, due: list[list[int]]
) -> None:
    asked = ASKED.get(name, SEEN)
    jobs = [spread.ask(messages, max_tokens=400) for messages in (*asked[:2], NONE)]
    spread.until(lambda: bool(spread.outputs.get(jobs[0])), "the first one runs")
    for job in jobs:
        spread.engine.cancel(job)
    assert spread.answer(asked[3]) == due[3]
    spread.until_idle()


@lane
def test_asleep_and_awake_again_it_says_the_same(
    spread: Seeing, name: str, due: list[list[int]]
) -> None:
    spread.engine.sleep()
    spread.engine.wake()
    assert spread.answer(ASKED.get(name, SEEN)[3]) == due[3]
