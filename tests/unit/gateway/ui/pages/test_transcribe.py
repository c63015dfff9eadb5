"""What the page Transcribe gives its scripts, and says of models."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any, cast

import pytest

from servekit.gateway import ui
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.routing.router import Router
from servekit.gateway.ui.pages import transcribe
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.pages.page_layout import Frame
from servekit.protocol import messages as wire
from servekit.protocol.access import AccessRules, KeyRule

SCRIPTS = [Path(ui.__file__).with_name(name) for name in ("recordings.js", "transcripts.js")]


def make_frame(*models: wire.ModelStatus, keys: tuple[KeyRule, ...] = ()) -> Frame:
    router = Router("gateway/test")
    router.apply_topology(wire.Topology(models, access=AccessRules(keys=keys)))
    rest: Any = dict.fromkeys(["supervisor", "watch", "runs", "tail", "requests", "tools"])
    return Frame(router, Say("en"), max_body_bytes=2**20, **rest)


def make_model(name: str, *serves: str, max_audio_s: float = 0.0) -> wire.ModelStatus:
    info = wire.ModelInfo(
        10, 1, False, "a", "none", "cpu", serves=cast(Any, serves), max_audio_s=max_audio_s
    )
    return wire.ModelStatus(name, "transformers", "-", 0, (), info=info)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_scripts_get_their_sentences_and_limits(language: str) -> None:
    html = transcribe._render_recorder(Say(language), 2**20)
    given = dict(re.findall(r'data-([\w-]+)="([^"]*)"', html))
    assert int(given["most-bytes"]) == 2**20 - 65_536
    texts = json.loads(unescape(given["texts"]))
    assert texts["transcribe.kind"].startswith("{name}")
    asked = "".join(script.read_text() for script in SCRIPTS)
    for name, fields in transcribe._TEXTS.items():
        assert set(re.findall(r"\{(\w+)\}", texts[name])) == set(fields)
        stem = name.removeprefix("transcribe.").partition(".")[0]
        assert f'"{stem}' in asked or f"`{stem}" in asked, name
    calls = ("/ui/v1/audio/transcriptions", "/ui/v1/audio/translations")
    assert (given["transcribe"], given["translate"]) == calls


async def test_where_no_model_transcribes_the_page_says_how_to_serve_one() -> None:
    html = transcribe._render_state(make_frame(make_model("chat", "generate")), None, "chat")
    assert "openai/whisper" in html
    assert 'href="/docs/audio"' in html


async def test_the_longest_recording_is_told_to_those_who_may_see_the_model() -> None:
    models = make_model("whisper", "transcribe", max_audio_s=90), make_model("other", "transcribe")
    assert 'data-most-s="90"' in transcribe._render_state(make_frame(*models), None, "whisper")
    assert 'data-most-s="0"' in transcribe._render_state(make_frame(*models), None, "other")
    rule = KeyRule("guest", models=("other",))
    frame = make_frame(*models, keys=(rule,))
    assert 'data-most-s="0"' in transcribe._render_state(frame, ApiKey(rule, 0.0), "whisper")
    assert "whisper" in transcribe._render_state(frame, None, "whisper")  # the hint


def test_empty_fields_are_left_out_of_the_request() -> None:
    plain = transcribe.make_options("m", " ", False, False, "")
    assert (plain.path, plain.body) == (
        "/v1/audio/transcriptions",
        {"file": "speech.wav", "model": "m"},
    )
    full = transcribe.make_options("m", "de ", True, True, "Dr. Ödön")
    assert full.path == "/v1/audio/translations"
    assert full.body["language"] == "de"
    assert full.body["response_format"] == "verbose_json"
