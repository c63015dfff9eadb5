"""Presets in the file: names of their own, values in range, and where they would do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.load import load_config
from tests.unit.config.test_load import complaints, write

HEAD = """
    models:
      - name: m
        engine: echo
        max_context: 64
        aliases: [other]
        presets:
"""
REMOTE = """
    models:
      - name: m
        engine: openai
        path: p
        options: {{url: 'http://127.0.0.1:1/v1'{options}}}
        presets:
          - {preset}
"""
NO_TEMPLATE = "it would not reach the endpoint's chat template"


def filed(tmp_path: Path, *lines: str, more: str = "") -> Path:
    return write(tmp_path, HEAD + "".join(f"          - {line}\n" for line in lines) + more)


def remote(tmp_path: Path, preset: str, options: str = "") -> Path:
    return write(tmp_path, REMOTE.format(preset=preset, options=options))


def test_a_model_has_all_their_names(tmp_path: Path) -> None:
    more = """
    server: {default_model: fast}
    keys: [{name: k, environment: K, models: [fast]}]
"""
    lines = (
        "{name: fast, sampling: {temperature: 0, max_tokens: 8}, thinking: false}",
        "{name: slow, system: Be exact., template: {reasoning_effort: high}}",
    )
    config = load_config(filed(tmp_path, *lines, more=more))
    [model] = config.models
    assert model.names == ("m", "other", "fast", "slow")
    fast, slow = model.presets
    assert fast.sampling.model_dump(exclude_none=True) == {"temperature": 0.0, "max_tokens": 8}
    assert (fast.thinking, fast.system, fast.template) == (False, None, {})
    assert (slow.thinking, slow.system) == (None, "Be exact.")
    assert slow.template == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{name: m}", "'m' is taken by models[0].name on line 3."),
        ("{name: other}", "'other' is taken by models[0].aliases[0] on line 6."),
        ("{name: a b}", "a name begins with a letter or digit"),
        ("{system: x}", "models[0].presets[0].name: missing; the name requests use."),
        ("{name: x, systm: y}", "unknown key. Did you mean 'system'?"),
        ("{name: x, sampling: {top_pp: 1}}", "unknown key. Did you mean 'top_p'?"),
        ("{name: x, sampling: {top_p: 2}}", "must be at most 1, but is the number 2."),
        ("{name: x, sampling: {max_tokens: 64}}", "64 tokens and a prompt do not fit"),
        ("{name: x, top_p: 1}", "'top_p' belongs under models[0].presets[0].sampling."),
        ("{name: x, presets: [{name: y}]}", "'presets' belongs under models[0]."),
        ("{name: x, thinking: low}", "must be true or false, but is the text 'low'."),
        ("{name: x, system: ''}", "must be text that is not empty"),
        ("{name: x, template: {messages: []}}", "template.messages: servekit sets this."),
        ("{name: x, template: {a: [{b: 9223372036854775808}]}}", "of 64 bits at most."),
        ("{name: x, template: {a: .nan}}", "template: its numbers must be finite"),
        ("{name: x, sampling: {max_tokens: 9999999999}}", "must be less than 2147483648"),
    ],
)
def test_what_is_wrong_is_named_by_line(tmp_path: Path, line: str, words: str) -> None:
    [found] = complaints(filed(tmp_path, line))
    assert words in found


def test_presets_and_adapters_have_different_names(tmp_path: Path) -> None:
    more = "        adapters: [{name: x, path: org/x}]\n"
    found = complaints(filed(tmp_path, "{name: x}", "{name: x}", more=more))
    assert [line.split(": ")[-1] for line in found] == [
        "'x' is taken by models[0].presets[0].name on line 8."
    ] * 2


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        ("{name: x, thinking: false}", "", f"thinking: {NO_TEMPLATE}"),
        ("{name: x, template: {a: 1, reasoning_effort: low}}", "", f"template.a: {NO_TEMPLATE}"),
        ("{name: x}", ", task: embed", "presets: a preset is for text, and this model generates"),
    ],
)
def test_what_an_endpoint_would_not_take(
    tmp_path: Path, preset: str, options: str, words: str
) -> None:
    [found] = complaints(remote(tmp_path, preset, options))
    assert words in found


def test_what_an_endpoint_takes(tmp_path: Path) -> None:
    load_config(remote(tmp_path, "{name: x, template: {reasoning_effort: low}}"))
    asked = "{name: x, thinking: false, template: {a: 1}}"
    load_config(remote(tmp_path, asked, ", chat_template_kwargs: true"))


def test_a_folder_of_an_embedding_model_has_none(tmp_path: Path) -> None:
    folder = tmp_path / "embedder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    path = write(tmp_path, "models: [{name: e, path: ./embedder, presets: [{name: x}]}]\n")
    load_config(path)
    (folder / "modules.json").write_text("[]")
    [found] = complaints(path)
    assert "models[0].presets: a preset is for text, and this model generates none." in found
