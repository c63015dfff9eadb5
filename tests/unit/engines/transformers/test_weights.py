"""Errors of a load as sentences with a remedy, and the progress of the library as reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from servekit.engines.transformers import weights
from servekit.errors import LoadError
from servekit.protocol.messages import Progress
from tests.unit.engines.contract.subjects import spec

SPEC = spec("transformers", "m")


def explained(folder: Path, error: Exception) -> LoadError:
    with pytest.raises(LoadError) as told, weights.explain_errors(folder, SPEC):
        raise error
    return told.value


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"),
        MemoryError("no memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_a_lack_of_memory_may_pass(tmp_path: Path, error: Exception) -> None:
    told = explained(tmp_path, error)
    assert not told.permanent
    first = str(error).splitlines()[0]
    assert told.message == f"model does not fit into the memory of cpu: {first}"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ValueError("set the option `trust_remote_code=True` to"),
            "model comes with its own Python code. If you trust it, set `trust_remote_code: true`",
        ),
        (
            ValueError("does not recognize this model type `new`\nadvice"),
            f"transformers {transformers.__version__} does not know this model (NewForCausalLM): ",
        ),
        (
            KeyError("Unrecognized configuration class"),
            f"transformers {transformers.__version__} does not know this model (NewForCausalLM): ",
        ),
        (
            ValueError("\n  odd shape  \nmore"),
            "model (NewForCausalLM) cannot be loaded: ValueError: odd shape",
        ),
        (ValueError(), "model (NewForCausalLM) cannot be loaded: ValueError: ValueError()"),
        (ImportError("no module x"), "model (NewForCausalLM) cannot be loaded: ImportError: no mo"),
    ],
)
def test_other_errors_would_come_again_and_say_what_to_do(
    tmp_path: Path, error: Exception, said: str
) -> None:
    told = explained(write_config(tmp_path, architectures=["NewForCausalLM"]), error)
    assert told.permanent
    assert told.message.startswith(said)


def test_a_package_that_a_quantised_model_needs_is_named(tmp_path: Path) -> None:
    stored = {"quant_method": "awq", "bits": 4}
    write_config(tmp_path, architectures=["X"], quantization_config=stored)
    told = explained(tmp_path, ImportError("autoawq is missing")).message
    assert told.startswith("model is stored quantised (awq), and a package for it is not installed")


def test_errors_of_ours_stay_as_they_are(tmp_path: Path) -> None:
    ours = LoadError("choose another", permanent=False)
    assert explained(tmp_path, ours) is ours


def test_files_without_names_are_told_so(tmp_path: Path) -> None:
    nested = '{"a":' * 100_000
    for content in (None, "{", "[]", '{"architectures": []}', '{"architectures": null}', nested):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        assert weights._read_architectures(tmp_path) == "an unnamed architecture"
        assert weights.read_model_type(tmp_path) == ""
    write_config(tmp_path, architectures=["A", "B"], model_type="llama")
    assert weights._read_architectures(tmp_path) == "A, B"
    assert weights.read_model_type(tmp_path) == "llama"


@pytest.mark.parametrize(
    ("architecture", "refused"),
    [
        ("LlamaForCausalLM", False),
        ("BertModel", True),
        ("BertForMaskedLM", True),
        ("BertForSequenceClassification", True),
        ("BertLMHeadModel", False),
        ("OwnCodeForCausalLM", False),
    ],
)
def test_random_heads_generate_nothing(tmp_path: Path, architecture: str, refused: bool) -> None:
    write_config(tmp_path, architectures=[architecture])
    if refused:
        with pytest.raises(
            LoadError, match=f"^{architecture} cannot generate text. If it is an em"
        ):
            weights._require_a_head(tmp_path)
    else:
        weights._require_a_head(tmp_path)


def test_a_model_is_loaded_as_what_it_does(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="llama")
    assert weights._choose_auto(tmp_path, "generate") is transformers.AutoModelForCausalLM
    assert weights._choose_auto(tmp_path, "embed") is transformers.AutoModel
    write_config(tmp_path, model_type="llava")
    assert weights._choose_auto(tmp_path, "generate") is transformers.AutoModelForMultimodalLM
    write_config(tmp_path, model_type="qwen2_5_omni")
    library: Any = transformers  # untyped there
    thinker = library.Qwen2_5OmniThinkerForConditionalGeneration
    assert weights._choose_auto(tmp_path, "see") is thinker


def test_numbers_are_float32_on_a_cpu_unless_told_otherwise() -> None:
    for dtype, device, chosen in (
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", "auto"),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float16", "cuda", torch.float16),
    ):
        given = spec("transformers", "m", dtype=dtype, device=device)
        assert weights._choose_dtype(given) == chosen


# ---------------------------------------------------------------- progress


def test_a_bar_of_weights_is_reported_about_a_hundred_times() -> None:
    told: list[Progress] = []
    bar = weights._Bar(told.append, desc="Loading weights", total=1000)
    for _ in range(1000):
        bar.update()
    assert told[0] == Progress("load", 0, 1000, "tensors")
    assert told[-1] == Progress("load", 1000, 1000, "tensors")
    assert len(told) == 101


def test_a_bar_around_items_counts_them_and_others_are_silent() -> None:
    told: list[Progress] = []
    with weights._Bar(told.append, ["a", "b"], desc="Materializing weights") as bar:
        assert list(bar) == ["a", "b"]
        bar.set_postfix(x=1)
        bar.close()
    assert [one.done for one in told] == [0, 1, 2] and told[0].total == 2
    silent = weights._Bar(told.append, total=3, desc="Downloading")
    silent.update(3)
    assert len(told) == 3


def test_the_librarys_bars_are_as_before_afterwards() -> None:
    from transformers.utils import logging as library_logging

    before = library_logging.set_tqdm_hook(None)
    library_logging.set_tqdm_hook(before)
    told: list[Progress] = []
    with weights._report_progress(told.append):
        for _ in library_logging.tqdm(range(2), desc="Loading weights"):
            pass
    assert [one.done for one in told] == [0, 1, 2]
    assert library_logging.set_tqdm_hook(before) is before
