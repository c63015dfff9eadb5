"""The pages in Firefox: the chat streams and stops, in the dark, without an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.firefox import ENTER, PROGRAM, Firefox
from tests.integration.instance import Instance, echo
from tests.polling import poll

pytestmark = [
    pytest.mark.lane("surroundings"),
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Firefox"),
]

LONG = "All work and no play makes this a long answer. " * 20
ANSWER = "document.querySelector('#sk-chat .bot-row .md')?.innerText ?? ''"
STOP = "document.querySelector('#sk-box [data-testid=stop-button]')"


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("firefox")
    with Instance.up(folder, [echo("talker", step_s=0.05)], server={"ui": True}) as instance:
        instance.until_settled()
        instance.until_ui(within_s=60)
        yield instance


@pytest.mark.parametrize("dark", [True, False])
def test_the_chat_streams_and_stops(tmp_path: Path, instance: Instance, dark: bool) -> None:
    with Firefox.started(tmp_path, dark=dark) as firefox:
        firefox.open(f"{instance.url}/ui/")
        box = "document.querySelector('#sk-box textarea')"
        poll("the page is there", lambda: firefox.evaluate(f"{box} !== null"))
        model = "document.querySelector('#sk-model input')?.value ?? ''"
        poll("a model is chosen", lambda: firefox.evaluate(model))
        assert is_dark(firefox) == dark
        firefox.evaluate(f"{box}.focus()")
        firefox.type(LONG + ENTER)
        poll("it streams", lambda: "All work" in firefox.evaluate(ANSWER))
        assert firefox.evaluate(f"{STOP} !== null")
        poll("it is told", lambda: instance.gateway().in_flight == 1)
        firefox.evaluate(f"{STOP}.click()")
        poll("it stops", lambda: firefox.evaluate(f"{STOP} === null"))
        poll("nothing runs", lambda: instance.gateway().in_flight == 0)
        assert len(firefox.evaluate(ANSWER)) < len(LONG)
        assert firefox.errors == []


def test_the_other_pages_open(tmp_path: Path, instance: Instance) -> None:
    with Firefox.started(tmp_path, dark=False) as firefox:
        for page in ("compare", "playground", "embeddings", "structured", "dashboard"):
            firefox.open(f"{instance.url}/ui/{page}")
            firefox.errors.clear()  # requests of the page before were broken off
            button = "document.querySelector('.gradio-container button') !== null"
            poll(f"{page} is there", partial(firefox.evaluate, button))
            assert firefox.errors == []


def is_dark(firefox: Firefox) -> bool:
    """Whether the page's background is darker than its text."""
    shown = firefox.evaluate(
        "JSON.stringify([getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('#sk-box textarea')).color].map("
        "colour => colour.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)))"
    )
    background, text = json.loads(shown)
    return bool(background < text)
