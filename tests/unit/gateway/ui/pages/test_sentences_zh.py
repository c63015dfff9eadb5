"""The Chinese of sentences that other processes make, with the code that makes them."""

from __future__ import annotations

import re

import pytest

from servekit.engines.media.recording import decode_recording
from servekit.errors import RequestError
from servekit.gateway.http.asgi import too_large
from servekit.gateway.routing.failures.retry_policy import NOT_RESUMED
from servekit.gateway.routing.router import Router
from servekit.gateway.ui.pages.admin_page import write_story
from servekit.gateway.ui.pages.embeddings import MOST_TEXTS, texts_of
from servekit.gateway.ui.pages.language import SAY_ENGLISH, Say
from servekit.gateway.ui.pages.playground import MOST_TOKENS, make_options
from servekit.protocol import messages as wire
from servekit.protocol.residency import ResidencyStatus
from servekit.protocol.types import ExitRecord, ReplicaHistory
from servekit.supervisor.process.child_process import Exit
from tests.unit.engines.hearing_model import make_samples, write_wav

SAY = Say("zh")
WAV = write_wav(make_samples(1))


def refusal(reason: str, residence: ResidencyStatus | None = None) -> str:
    """The sentence with which the router refuses a request for a model that has failed."""
    router = Router("gateway/test")
    replica = wire.ReplicaStatus("m/0", "failed", "/nowhere.sock", 1, "cpu", reason=reason)
    status = wire.ModelStatus("m", "echo", "-", 0, (replica,), residence=residence)
    router.apply_topology(wire.Topology((status,)))
    return str(router.find("m").unavailable().message)


@pytest.mark.parametrize(
    "sentence",
    [
        Exit(None, 9, ()).explain(),
        Exit(None, 9, (), out_of_memory=True).explain(),
        Exit(None, 11, ()).explain(" before it was ready, while it loaded /模型"),
        Exit(3, None, ("它坏了",)).explain(" before it was ready"),
        "stopped at 05:01:43: unused for 30 s",
        "asleep since 05:01:43: evicted for big, 2.0 GiB needed, 1.0 GiB free",
        NOT_RESUMED,
    ],
)
def test_reasons_are_chinese(sentence: str) -> None:
    is_chinese(sentence)


def test_what_is_wrong_in_fields_is_chinese() -> None:
    for texts in ("", "text\n" * (MOST_TEXTS + 1)):
        with pytest.raises(RequestError) as raised:
            texts_of(texts)
        is_chinese(raised.value.message)
    with pytest.raises(RequestError) as raised:
        make_options("m", "text", MOST_TOKENS + 1, None, None, None, None)
    assert "此页" in SAY.translate(raised.value.message)


def test_the_story_of_a_worker_is_chinese() -> None:
    died = Exit(None, 9, ()).explain()
    record = ExitRecord(0.0, 1, 2.0, died, None, 9, "ready", "", 0, 0, 0, 0, (), ())
    history = ReplicaHistory("m/0", "failed", died, 1, None, (record,))
    stopped = ResidencyStatus("manual", "stopped", "stopped by an operator", None)
    story = write_story(wire.Why("m", "closed", (history,), residence=stopped), SAY)
    assert "killed" not in story
    assert "operator" not in story
    assert story.count("SIGKILL") == 2


async def test_refusals_are_chinese() -> None:
    is_chinese(refusal(Exit(None, 9, ()).explain()))
    is_chinese(refusal("", ResidencyStatus("manual", "stopped", "", None)))


@pytest.mark.parametrize(
    "file",
    [b"no audio", b"", WAV[:200], WAV, WAV[:44], b"RIFF....WAVE"],
)
def test_faults_of_recordings_are_chinese(file: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        decode_recording(file, 16_000, 0.5)
    is_chinese(raised.value.message)


def test_bodies_that_are_too_large_are_told_in_chinese() -> None:
    is_chinese(too_large(1).message)


def is_chinese(sentence: str) -> None:
    told = SAY.translate(sentence)
    assert re.search(r"[\u4e00-\u9fff]", told)
    words = set(re.findall(r"[a-z]{3,}", told))
    assert words <= {
        "big",
        "servekit",
        "load",
        "server",
        "max",
        "body",
        "bytes",
    }  # names and commands stay
    assert SAY_ENGLISH.translate(sentence) == sentence


def test_what_is_unknown_stays_as_it_is() -> None:
    assert SAY.translate("killed by SIGKILL") == "被 SIGKILL 终止"
    assert SAY.translate("a sentence {of} an engine") == "a sentence {of} an engine"
