"""What the files of a model say it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.model_files.model_kind import (
    ScoreTokens,
    find_model_kind,
    read_json,
    read_score_tokens,
    refuse_speech,
)
from servekit.errors import LoadError
from tests.unit.engines.contract.subjects import spec

POOLING = [{"type": "sentence_transformers.models.Transformer"}, {"type": "x.Pooling"}]
SCORING = [{"type": "x.Transformer"}, {"type": "x.LogitScore", "path": "1_LogitScore"}]


def write(folder: Path, architecture: str | None, modules: Any = None) -> Path:
    if architecture is not None:
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def kind(folder: Path, task: str = "auto", path: str = "org/model") -> str:
    return find_model_kind(folder, spec("transformers", path, options={"task": task}))


@pytest.mark.parametrize(
    ("architecture", "modules", "found"),
    [
        ("LlamaForCausalLM", None, "generate"),
        (None, None, "generate"),
        ("BertModel", POOLING, "embed"),
        ("LlamaForCausalLM", POOLING, "embed"),
        ("BertForSequenceClassification", None, "classify"),
        ("BertForSequenceClassification", [{"type": "x.Transformer"}], "classify"),
        ("BertForSequenceClassification", POOLING, "embed"),
        ("WhisperForConditionalGeneration", None, "transcribe"),
        ("Qwen3ForCausalLM", SCORING, "rerank"),
    ],
)
def test_the_kind_follows_the_files(
    tmp_path: Path, architecture: str | None, modules: Any, found: str
) -> None:
    assert kind(write(tmp_path, architecture, modules)) == found


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", "rerank"),
        ("/models/qwen3-reranker-4b", "rerank"),
        ("Qwen/Qwen3-0.6B", "generate"),
        ("Qwen3-Reranker/other", "generate"),
    ],
)
def test_a_known_reranker_is_known_by_its_name(tmp_path: Path, path: str, found: str) -> None:
    assert kind(write(tmp_path, "Qwen3ForCausalLM"), path=path) == found


def test_a_name_alone_makes_no_reranker(tmp_path: Path) -> None:
    folder = write(tmp_path, "LlamaForCausalLM")
    assert kind(folder, path="org/Qwen3-Reranker-0.6B") == "generate"
    write(tmp_path, "Qwen3ForCausalLM", POOLING)
    assert kind(folder, path="org/Qwen3-Reranker-0.6B") == "embed", "its files say what it is"


def test_a_task_that_is_asked_for_decides_where_the_files_allow_it(tmp_path: Path) -> None:
    write(tmp_path, "LlamaForCausalLM", POOLING)
    assert kind(tmp_path, "generate") == "generate"
    assert kind(tmp_path, "rerank") == "rerank"
    write(tmp_path, "BertForSequenceClassification")
    (tmp_path / "modules.json").unlink()
    assert kind(tmp_path, "rerank") == "classify"


@pytest.mark.parametrize(("name", "told"), [("BertModel", "BertModel"), (None, "no architecture")])
def test_a_model_that_is_none_cannot_rerank(tmp_path: Path, name: str | None, told: str) -> None:
    with pytest.raises(LoadError, match=f"is no causal language model; its files name {told}"):
        kind(write(tmp_path, name), "rerank")


def test_tokens_of_a_score_are_read_or_told_to_be_wrong(tmp_path: Path) -> None:
    assert read_score_tokens(tmp_path) is None
    assert read_score_tokens(write(tmp_path, None, POOLING)) is None
    write(tmp_path, None, SCORING)
    with pytest.raises(LoadError, match=r"^The tokens of 1_LogitScore/config\.json cannot be "):
        read_score_tokens(tmp_path)
    (tmp_path / "1_LogitScore").mkdir()
    path = tmp_path / "1_LogitScore" / "config.json"
    path.write_text('{"true_token_id": 7}')
    assert read_score_tokens(tmp_path) == ScoreTokens(7)
    path.write_text('{"true_token_id": 7, "false_token_id": 8, "more": 1}')
    assert read_score_tokens(tmp_path) == ScoreTokens(7, 8)
    path.write_text('{"false_token_id": 8}')
    with pytest.raises(LoadError, match="true_token_id"):
        read_score_tokens(tmp_path)


def test_engines_without_recordings_refuse_whisper(tmp_path: Path) -> None:
    given = spec("llamacpp", "whisper")
    refuse_speech(write(tmp_path, "LlamaForCausalLM"), given)
    with pytest.raises(LoadError, match="hears speech, which this engine does not serve; write "):
        refuse_speech(write(tmp_path, "WhisperForConditionalGeneration"), given)


def test_a_file_that_is_missing_is_told_from_one_that_is_no_json(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json") is None
    for text in (b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "x.json").write_bytes(text)
        assert read_json(tmp_path / "x.json") == {}
    for odd in ("[]", '{"architectures": "x"}', '{"architectures": []}', "7"):
        (tmp_path / "config.json").write_text(odd)
        assert kind(tmp_path) == "generate"
