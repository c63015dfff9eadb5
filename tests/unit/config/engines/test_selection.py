"""`engine: auto`: the decision table, and what becomes of it in a file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from servekit.config.engines.installed import Machine
from servekit.config.engines.requirements import Asked
from servekit.config.engines.selection import choose_engine
from servekit.config.load import load_config, load_here, suggest_engines
from servekit.errors import ConfigError
from tests.unit.config.test_load import write

ALL = ("transformers", "vllm", "xllamacpp")


def machine(gpu: bool = False, modules: Collection[str] = ALL) -> Machine:
    return Machine(gpu, frozenset(modules).__contains__)


GGUF, FOLDER = Asked("gguf"), Asked("folder")


@pytest.mark.parametrize(
    ("asks", "where", "expected"),
    [
        (GGUF, machine(), "llamacpp: a GGUF file, and xllamacpp is installed"),
        (GGUF, machine(gpu=True), "llamacpp: a GGUF file, and xllamacpp is installed"),
        (
            GGUF,
            machine(modules=["transformers", "llama_cpp"]),
            "llamacpp: a GGUF file, and llama_cpp is installed",
        ),
        (
            GGUF,
            machine(modules=["transformers"]),
            "transformers: a GGUF file; llamacpp, which runs it as it is, is not installed "
            "(servekit engine install llamacpp)",
        ),
        (
            Asked("gguf", options=frozenset({"library"})),
            machine(modules=["transformers"]),
            "llamacpp: a GGUF file, and its options name a library",
        ),
        (
            Asked("gguf", adapters=("LORA",)),
            machine(),
            "transformers: a GGUF file; llamacpp, which runs it as it is, has no adapters",
        ),
        (Asked("ctranslate2"), machine(gpu=True), "faster_whisper: a model of CTranslate2"),
        (FOLDER, machine(), "transformers: no GPU was found here"),
        (FOLDER, machine(gpu=True), "vllm: on a GPU, and vllm is installed"),
        (Asked("folder", on_cpu=True), machine(gpu=True), "transformers: on a CPU"),
        (
            FOLDER,
            machine(gpu=True, modules=["transformers"]),
            "transformers: on a GPU; vllm, which is faster there, is not installed "
            "(servekit engine install vllm)",
        ),
        (
            Asked("folder", adapters=("LORA", "BOFT")),
            machine(gpu=True),
            "transformers: on a GPU; vllm, which is faster there, has LORA adapters only, and this "
            "one is BOFT",
        ),
        (
            Asked("folder", adapters=("?",)),
            machine(gpu=True),
            "transformers: on a GPU; vllm, which is faster there, has LORA adapters only, and what "
            "one on the hub is is not known before it is fetched",
        ),
        (
            Asked("folder", adapters=("LORA",), sleeps=True, gpus=2, parallel="tensor"),
            machine(gpu=True),
            "vllm: on a GPU, and vllm is installed",
        ),
        (
            Asked("folder", gpus=2, parallel="device_map"),
            machine(gpu=True),
            "transformers: on a GPU; vllm, which is faster there, has no `parallel: device_map`, "
            "only tensor",
        ),
        (
            Asked(None, options=frozenset({"url"})),
            machine(gpu=True),
            "openai: its options name an endpoint",
        ),
        (
            Asked("gguf", options=frozenset({"command"})),
            machine(gpu=True),
            "command: its options name a command",
        ),
        (Asked(None), machine(), "transformers: no GPU was found here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_table(asks: Asked, where: Machine, expected: str) -> None:
    assert str(choose_engine(asks, where)) == expected


FILE = """\
    models:
      - {name: g, engine: auto, path: m.gguf%s}
      - {name: h, engine: auto, path: org/name}
      - {name: r, engine: auto, path: gpt, options: {url: "https://x.example/v1"}}
      - {name: t, path: org/name}
"""


def filed(folder: Path, more: str = "") -> Path:
    (folder / "m.gguf").touch()
    return write(folder, FILE % more)


def test_nothing_is_left_to_choose(tmp_path: Path) -> None:
    config, choices = load_here(filed(tmp_path), machine())
    engines = {model.name: model.engine for model in config.models}
    assert engines == {"g": "llamacpp", "h": "transformers", "r": "openai", "t": "transformers"}
    assert {name: choice.engine for name, choice in choices.items()} == {
        name: engine for name, engine in engines.items() if name != "t"
    }
    assert config.models[0].path == str(tmp_path / "m.gguf")
    for model in config.models:
        model.engine_options()


def test_a_file_that_names_no_engine_is_told_of_another(tmp_path: Path) -> None:
    models = """\
    models:
      - {name: g, path: m.gguf}
      - {name: n, path: m.gguf, engine: transformers}
      - {name: o, path: m.gguf, options: {block_size: 32}}
      - {name: h, path: org/name}
    """
    (tmp_path / "m.gguf").touch()
    config, _ = load_here(write(tmp_path, models), machine())
    [(name, choice)] = suggest_engines(config, tmp_path, machine())
    assert (name, choice.engine) == ("g", "llamacpp")
    assert list(suggest_engines(config, tmp_path, machine(modules=["transformers"]))) == []


def test_it_is_chosen_anew_when_something_else_is_installed(tmp_path: Path) -> None:
    path = filed(tmp_path)
    before, _ = load_here(path, machine(gpu=True, modules=["transformers"]))
    after, _ = load_here(path, machine(gpu=True))
    assert [model.engine for model in before.models[:2]] == ["transformers", "transformers"]
    assert [model.engine for model in after.models[:2]] == ["llamacpp", "vllm"]


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (ALL, "'block_size' is an option of `engine: transformers`."),
        (["transformers"], "models[0].options.gpu_layers: unknown key here; 'gpu_layers' is an"),
    ],
)
def test_options_are_those_of_what_was_chosen(
    tmp_path: Path, modules: list[str], words: str
) -> None:
    path = filed(tmp_path, ", options: {block_size: 32, gpu_layers: 1}")
    with pytest.raises(ConfigError) as caught:
        load_here(path, machine(modules=modules))
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{path}:2:") and words in line


def test_the_file_alone_leaves_it_open(tmp_path: Path) -> None:
    assert [model.engine for model in load_config(filed(tmp_path)).models[:3]] == ["auto"] * 3
