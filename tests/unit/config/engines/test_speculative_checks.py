"""`speculative`: what a file is told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.engines.installed import Machine
from servekit.config.load import load_here
from servekit.errors import ConfigError
from tests.unit.config.test_load import write

FILE = "models:\n  - {name: a, %s}\n"
NGRAM = "speculative: {method: ngram}"
HERE = frozenset({"torch", "transformers", "xllamacpp", "numpy"})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (f"options: {{{NGRAM}}}", ""),
        ("options: {speculative: {method: ngram, tokens: 8, ngram_max: 5, ngram_min: 5}}", ""),
        ("options: {speculative: {method: draft, model: org/small}}", ""),
        ("options: {speculative: {method: draft}}", "needs `model`, the path of a smaller model"),
        ("options: {speculative: {method: ngram, model: org/small}}", "for `method: draft`"),
        ("options: {speculative: {method: eagle}}", "must be ngram or draft"),
        ("options: {speculative: {method: ngram, tokens: 0}}", "at least 1"),
        ("options: {speculative: {method: ngram, tokens: 33}}", "at most 32"),
        ("options: {speculative: {method: ngram, ngram_min: 4}}", "4, more than ngram_max, 3"),
        ("options: {speculative: {method: ngram, depth: 3}}", "depth"),
        ("options: {speculative: {tokens: 3}}", "method"),
        ("options: {speculative: ngram}", "speculative"),
        ("options: {speculative: {method: draft, model: ./nowhere}}", "nowhere: does not exist"),
        (f"options: {{{NGRAM}, batching: static}}", "needs continuous batching"),
        (f"options: {{{NGRAM}, decode: eager}}", "part of servekit's own decoding"),
        (f"options: {{{NGRAM}, attention: eager}}", "needs the default attention"),
        (f"options: {{{NGRAM}, task: rerank}}", "a reranker generates no text"),
        (f"gpus_per_replica: 2, options: {{{NGRAM}}}", "is on one GPU; engine vllm spreads it"),
        (f"engine: llamacpp, path: org/n/m.gguf, options: {{{NGRAM}}}", ""),
        (f"engine: llamacpp, path: org/n/m.gguf, gpus_per_replica: 2, options: {{{NGRAM}}}", ""),
        (
            "engine: llamacpp, path: org/n/m.gguf,"
            " options: {speculative: {method: draft, model: org/n/s.gguf}}",
            "",
        ),
        (
            "engine: llamacpp, path: org/n/m.gguf,"
            " options: {speculative: {method: draft, model: org/small}}",
            "GGUF files, and this is none",
        ),
        (
            f"engine: llamacpp, path: org/n/m.gguf, options: {{{NGRAM}, pooling: mean}}",
            "no text to speculate about",
        ),
        (f"engine: vllm, options: {{{NGRAM}}}", "speculative"),
    ],
)
def test_what_a_speculating_model_cannot_have(tmp_path: Path, keys: str, words: str) -> None:
    try:
        load_here(
            write(tmp_path, FILE % (keys if "path:" in keys else f"path: org/name, {keys}")),
            Machine(True, HERE.__contains__),
        )
    except ConfigError as error:
        assert words
        assert words in error.message
    else:
        assert not words


def test_a_draft_models_folder_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    text = FILE % "path: org/name, options: {speculative: {method: draft, model: small}}"
    config, _ = load_here(write(tmp_path, text), Machine(True, HERE.__contains__))
    assert config.models[0].options["speculative"]["model"] == str(tmp_path / "small")
