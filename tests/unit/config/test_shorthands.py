"""Shorthands of the file: durations and counts with units, variables in paths; others' keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.load import load_config
from servekit.config.schema import Config
from servekit.errors import ConfigError


def load(folder: Path, text: str) -> Config:
    path = folder / "servekit.yaml"
    path.write_text(text)
    return load_config(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    return caught.value.message.replace(f"{folder}/servekit.yaml:", "")


def model(folder: Path, more: str) -> str:
    return refusal(folder, f"models: [{{name: a, path: org/name, {more}}}]")


def test_units_are_numbers(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
models:
  - {name: a, engine: echo, idle_unload_s: 5m, timeout_s: 1h30m, stall_timeout_s: 500ms,
     max_context: 4k, sampling: {max_tokens: 1K}}
server: {drain_timeout_s: 10}
keys: [{name: k, environment: K, tokens_per_minute: 4k, monthly_tokens: 2.5M}]
""",
    )
    (one,), (key,) = config.models, config.keys
    assert (one.idle_unload_s, one.timeout_s, one.stall_timeout_s) == (300, 5400, 0.5)
    assert (one.max_context, one.sampling.max_tokens) == (4096, 1024)
    assert (key.tokens_per_minute, key.monthly_tokens) == (4000, 2_500_000)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("idle_unload_s: soon", "must be a number, but is the text 'soon'. Write seconds"),
        ("idle_unload_s: '300'", "Leave out the quotes"),
        ("max_context: many", "must be a whole number"),
        ("max_context: 4g", "must be a whole number"),
        (f"max_context: {'9' * 400}k", "must be a whole number"),
        ("timeout_s: 0m", "must be more than 0"),
    ],
)
def test_what_is_no_unit_is_told(tmp_path: Path, more: str, said: str) -> None:
    assert said in model(tmp_path, more)


def test_variables_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", str(tmp_path))
    monkeypatch.delenv("NO_SUCH", raising=False)
    (tmp_path / "qwen").mkdir()
    for path in ("${MODELS}/qwen", "$MODELS/qwen", "${NO_SUCH:-.}/qwen"):
        (one,) = load(tmp_path, f"models: [{{name: a, path: '{path}'}}]").models
        assert one.path == str(tmp_path / "qwen"), path
    said = refusal(tmp_path, "models: [{name: a, path: '${NO_SUCH}/x'}, {name: b, path: ./nil}]")
    assert "NO_SUCH is not set" in said
    assert "does not exist" in said, "in the same round"
    (one,) = load(tmp_path, "models: [{name: a, engine: echo, env: {X: '${MODELS}'}}]").models
    assert one.env == {"X": "${MODELS}"}, "other texts mean what they say"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("tensor_parallel_size: 2", "`gpus_per_replica: 2`"),
        ("gpu_memory_utilization: 0.85", "`memory: 85%`"),
        ("max_model_len: 8192", "`max_context: 8192`"),
        ("enable-prefix-caching: true", "{engine_args: {enable_prefix_caching: true}}"),
        ("num_ctx: 4096", "`max_context: 4096`"),
        ("ttl: 300", "`idle_unload_s: 300`"),
        ("keep_alive: 5m", "`idle_unload_s: 5m`"),
        ("cmd: llama-server", "`engine: command`"),
        ("options: {num_ctx: 4096}", "`max_context: 4096`"),
        ("load: lazy", "Write on_demand"),
        ("memory: 0.5", "Write 50%, a share of the GPU, or 20GiB"),
        ("memory: 20", "Write 20GiB, or 20% of the GPU"),
        ("replcas: 2", "Did you mean 'replicas'?"),
        ("max_num_seqs: true", "{slots: true}"),
    ],
)
def test_keys_of_other_programs_are_answered_with_ours(
    tmp_path: Path, more: str, said: str
) -> None:
    assert said in model(tmp_path, more)


def test_other_forms_are_answered_with_ours(tmp_path: Path) -> None:
    said = refusal(tmp_path, "models:\n  qwen:\n    path: Qwen/Qwen3-0.6B\n")
    assert "[{name: qwen, path: Qwen/Qwen3-0.6B, …}]" in said
    assert "--from llama-swap" in refusal(tmp_path, "models: {a: {cmd: x, ttl: 3}}")
    assert "`servekit key new` prints" in refusal(
        tmp_path, "models: [{name: a, engine: echo}]\nkeys: [sk-1, {name: b, key: sk-2}]"
    )
    assert "write `name: a`" in refusal(tmp_path, "models:\n  - name:a\n    path: x\n")
    assert "a bracket is not closed" in refusal(tmp_path, "models: [\n")
    assert "`models` is the list" in refusal(tmp_path, "model_list: []")


def test_one_round_tells_wrong_keys_and_wrong_paths(tmp_path: Path) -> None:
    said = refusal(tmp_path, "models: [{name: a, path: ./nil, replcas: 2, memory: 0.5}]")
    assert len(said.splitlines()) == 3
