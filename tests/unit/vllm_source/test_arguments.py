"""vLLM's engine arguments: their names, and what is said of those that cannot be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.vllm_source.arguments import (
    NEUTRAL,
    OWN,
    explain_own,
    explain_unknown,
    normalize_name,
    normalize_names,
    read_arguments,
)


def test_an_argument_may_be_written_as_on_a_command_line() -> None:
    assert normalize_name("--kv-cache-dtype") == "kv_cache_dtype"
    assert normalize_name("kv_cache_dtype") == "kv_cache_dtype"
    found = normalize_names({"--seed": 1, "swap-space": None})
    assert found == {"seed": 1, "swap_space": None}


def test_an_argument_may_not_be_written_in_two_ways_at_once() -> None:
    with pytest.raises(ValueError, match=r"^kv_cache_dtype stands twice$"):
        normalize_names({"kv-cache-dtype": "auto", "--kv_cache_dtype": "fp8"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("--max-model-len", "servekit sets max_model_len itself: write the model's `max_context` "),
        ("data-parallel-size", "servekit sets data_parallel_size itself: write the model's `repli"),
        ("data_parallel_backend", "servekit sets data_parallel_backend itself: write the model's"),
        ("tokenizer", "servekit sets tokenizer itself: servekit tokenizes itself, with the"),
        ("kv_cache_dtype", ""),
        ("data_parallelism", ""),
    ],
)
def test_an_argument_that_servekit_sets_is_told_with_what_to_write(name: str, said: str) -> None:
    found = explain_own(name)
    assert found.startswith(said) and bool(found) == bool(said)
    assert not found or (found.endswith(".") and not found.endswith(".."))


def test_an_argument_that_this_vllm_does_not_have_is_told_with_the_nearest() -> None:
    known = ["kv_cache_dtype", "seed"]
    assert explain_unknown("--kv-cache-dtype", known, "0.31.0") == ""
    assert explain_unknown("kv_cache_dtyp", known, "0.31.0") == (
        "vLLM 0.31.0 has no engine argument kv_cache_dtyp; did you mean kv_cache_dtype?"
    )
    near_own = explain_unknown("max_model_length", known, "0.31.0")
    assert near_own.endswith("did you mean max_model_len?"), "one that servekit sets"
    assert explain_unknown("zzz", known, "0.31.0") == ("vLLM 0.31.0 has no engine argument zzz.")


def test_what_servekit_sets_itself_is_not_called_neutral() -> None:
    assert not NEUTRAL & OWN.keys()
    assert all(normalize_name(name) == name for name in (*NEUTRAL, *OWN))


def write(root: Path, text: str) -> None:
    file = root / "vllm" / "engine" / "arg_utils.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_arguments_are_those_of_the_class_without_private_ones(tmp_path: Path) -> None:
    write(
        tmp_path, "class EngineArgs:\n    model: str = ''\n    _own: int = 0\n    seed: int = 0\n"
    )
    assert read_arguments(tmp_path) == ("model", "seed")


@pytest.mark.parametrize("text", ["", "class Other:\n    a: int\n", "def ("])
def test_sources_that_cannot_be_read_have_no_arguments(tmp_path: Path, text: str) -> None:
    assert read_arguments(tmp_path) == ()
    write(tmp_path, text)
    assert read_arguments(tmp_path) == ()
