"""What an engine refuses that implements nothing beyond the required."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from servekit.engines.api.base import EmbedJob, Engine, Job, SpeechJob
from servekit.engines.api.text_engine import TextEngine
from servekit.errors import Unsupported
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import Generate, Grammar, SamplingParams, SpeechParams
from tests.unit.engines.contract.subjects import spec


class Least(Engine):
    """The least engine."""

    def load(self, report: Any) -> Any: ...
    def start(self, emit: Any) -> None: ...
    def submit(self, job: Job) -> None: ...
    def cancel(self, job_id: int) -> None: ...
    def load_now(self) -> Any: ...
    def close(self) -> None: ...


class LeastText(TextEngine, Least):
    """The least engine of text."""

    submit = TextEngine.submit

    def ask(self, job: Any) -> None: ...


SPEECH = SpeechJob(1, None, SamplingParams(), SpeechParams(0))
REFUSALS: list[tuple[Callable[[Engine], object], str, str]] = [
    (lambda one: one.embed(EmbedJob(1, [])), "this engine makes no embeddings", "model"),
    (lambda one: one.classify(EmbedJob(1, [])), "this engine does not classify", "model"),
    (lambda one: one.read_recording(b"", SPEECH.speech), "does not transcribe", "model"),
    (lambda one: one.transcribe(SPEECH), "this engine does not transcribe", "model"),
    (lambda one: one.load_adapter(AdapterSpec("a", "/a")), "has no adapters", "lora_name"),
    (lambda one: one.unload_adapter("a"), "this engine has no adapters", "lora_name"),
    (
        lambda one: one.constrain(Grammar("regex", "a", param="response_format"), ()),
        "this engine does not support grammars",
        "response_format",
    ),
    (lambda one: one.encode_media([], [], {}, False), "takes no images and no rec", "messages"),
    (lambda one: one.sleep(), "this engine cannot sleep", "model"),
    (lambda one: one.wake(), "this engine cannot sleep", "model"),
]


@pytest.mark.parametrize(("ask", "said", "param"), REFUSALS)
def test_what_an_engine_does_not_have_is_refused_by_name(
    ask: Callable[[Engine], object], said: str, param: str
) -> None:
    with pytest.raises(Unsupported, match=said) as error:
        ask(Least(spec("echo", "m")))
    assert error.value.param == param


def test_a_step_that_is_to_fail_is_refused_where_it_cannot() -> None:
    with pytest.raises(Unsupported, match="cannot be made to fail"):
        Least(spec("echo", "m")).fail_step()


def test_an_engine_of_text_takes_no_tokens_and_is_in_no_trouble() -> None:
    engine = LeastText(spec("echo", "m"))
    with pytest.raises(Unsupported, match="text, not token ids") as error:
        engine.submit(Job(1, [1], SamplingParams()))
    assert error.value.param == "prompt"
    assert engine.trouble == "" and not engine.probed
    assert not engine.continues(Generate(1, SamplingParams()))
