"""A remote model in the file: where it is, and what is not this file's to say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.load import load_config
from tests.unit.config.test_load import complaints, write

HEAD = """
    models:
      - name: m
        engine: openai
        path: kimi
"""
URL = "url: http://127.0.0.1:9/v1"


def filed(folder: Path, options: str = URL, *lines: str) -> Path:
    more = "".join(f"        {line}\n" for line in lines)
    return write(folder, f"{HEAD}        options: {{{options}}}\n{more}")


def test_a_name_at_an_endpoint_is_no_path(tmp_path: Path) -> None:
    [model] = load_config(filed(tmp_path)).models
    assert model.path == "kimi"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "url"),
        ("url: api.example.com/v1", "url"),
        ("url: 'https://ann:pw@api.example.com/v1'", "url"),
        ("url: 'https://api.example.com/v1?key=1'", "url"),
        ("url: 'ftp://api.example.com'", "url"),
        (f"{URL}, key_environment: sk-1234567", "key_environment"),
        (f"{URL}, headers: {{authorization: Bearer x}}", "so that it stands in no file"),
        (f"{URL}, headers: {{Content-Length: '7'}}", "servekit's to set"),
        (f'{URL}, headers: {{a: "b\\r\\nc: d"}}', "headers"),
        (f"{URL}, headers: {{'a b': c}}", "headers"),
        (f"{URL}, task: rerank", "must be generate or embed"),
        (f"{URL}, requests_per_minute: 0", "must be at least 1"),
        (f"{URL}, api_key: x", "unknown key"),
    ],
)
def test_options_that_are_wrong(tmp_path: Path, options: str, words: str) -> None:
    found = complaints(filed(tmp_path, options))
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("revision: main", "models[0].revision: the model is loaded elsewhere"),
        ("dtype: bfloat16", "models[0].dtype: the model is loaded elsewhere"),
        ("gpus: [0]", "models[0].gpus: the model is loaded elsewhere"),
        ("tool_parser: hermes", "models[0].tool_parser: the model is loaded elsewhere"),
        ("device: cuda", "its worker uses no GPU"),
        ("adapters: [{name: x, path: org/x}]", "the engine openai has no adapters"),
    ],
)
def test_what_is_its_endpoint_s_to_say(tmp_path: Path, line: str, words: str) -> None:
    assert words in complaints(filed(tmp_path, URL, line))[0]


def test_limits_hold_for_all_or_for_nobody(tmp_path: Path) -> None:
    found = complaints(filed(tmp_path, f"{URL}, requests_per_minute: 60", "replicas: 2"))
    assert "each replica would keep to the endpoint's limits by itself" in found[0]
    assert load_config(filed(tmp_path, URL, "replicas: 2")).models[0].replicas == 2
    assert load_config(filed(tmp_path, f"{URL}, requests_per_minute: 60", "replicas: 1"))
