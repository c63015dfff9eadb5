"""The contract with vLLM: what a release lacks is named, and decides the interface."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from servekit.vllm_source import arguments, contract
from servekit.vllm_source.contract import ApiChoice, Required, find_missing
from servekit.vllm_source.reader import SourceTree

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
STANDARD = Path(json.__file__).parents[1]


@pytest.mark.parametrize(
    ("one", "sentences"),
    [
        (Required("json:JSONDecoder", ("decode", "strict")), []),  # a method and a parameter
        (Required("json:JSONDecoder", ("dance", "sing")), ["its JSONDecoder has no dance, sing"]),
        (Required("json.decoder:JSONDecodeError", ("msg", "doc", "pos"), made=True), []),
        (
            Required("json.decoder:JSONDecodeError", ("msg",), made=True),
            ["its JSONDecodeError needs doc, pos"],
        ),
        (
            Required("json.decoder:Dancer"),
            ["it has no json.decoder.Dancer (there is no such class or function)"],
        ),
        (
            Required("json.dances:Dancer"),
            ["it has no json.dances.Dancer (there is no such module)"],
        ),
    ],
)
def test_missing_parts_are_named(one: Required, sentences: list[str]) -> None:
    assert list(find_missing(one, SourceTree(STANDARD))) == sentences


@pytest.mark.parametrize(
    ("version", "tried"),
    [
        ("0.19.1", False),
        ("0.20.2", True),
        ("0.26.0+cu130", True),
        ("0.32.0+cpu", True),
        ("0.34.0rc1", False),
        ("1.0.0", False),
        ("dev", False),
        ("", False),
    ],
)
def test_the_tested_releases(version: str, tried: bool) -> None:
    assert contract.is_tried(version) == tried


def test_the_extra_brings_a_tested_release() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    [extra] = project["optional-dependencies"]["vllm"]
    versions = [f"0.{minor}.0" for minor in range(50)]
    brought = list(Requirement(extra).specifier.filter(versions))
    assert brought and all(map(contract.is_tried, brought))


@pytest.mark.parametrize(
    ("asked", "version", "whole", "choice"),
    [
        ("auto", "0.33.0", True, ApiChoice("core")),
        ("core", "0.33.0", True, ApiChoice("core")),
        ("server", "0.33.0", True, ApiChoice("server")),
        ("server", "0.99.0", False, ApiChoice("server")),
        (
            "auto",
            "0.99.0",
            True,
            ApiChoice(
                "core",
                untested="vLLM 0.99.0 was not tested with servekit, only 0.20 to 0.33",
            ),
        ),
        ("auto", "0.99.0", False, ApiChoice("server", lacking="vLLM 0.99.0 lacks {}")),
        ("core", "0.33.0", False, ApiChoice("core", lacking="vLLM 0.33.0 lacks {}")),
    ],
)
def test_the_interface_follows_from_the_release(
    monkeypatch: pytest.MonkeyPatch, asked: str, version: str, whole: bool, choice: ApiChoice
) -> None:
    required: list[Any] = [Required("json:JSONDecoder"), Required("json:Dancer")]
    monkeypatch.setattr(contract, "REQUIRED", required[: 1 if whole else 2])
    found = contract.choose_api(asked, STANDARD, version)
    what = "what servekit uses of its core: it has no json.Dancer (there is no such class or "
    assert found == ApiChoice(
        choice.api, choice.lacking.format(f"{what}function)"), choice.untested
    )
    assert bool(found.warning) == bool(choice.lacking or choice.untested)


def test_arguments_are_read_again_when_vllm_changes(tmp_path: Path) -> None:
    engine = tmp_path / "vllm" / "engine"
    assert arguments.read_arguments(tmp_path) == ()
    engine.mkdir(parents=True)
    (engine / "arg_utils.py").write_text("class EngineArgs:\n    a: int\n    _b: int\n")
    assert arguments.read_arguments(tmp_path) == ("a",)
    (engine / "new.py").write_text("class EngineArgs:\n    a: int\n    c: int\n")
    shutil.move(engine / "new.py", engine / "arg_utils.py")
    assert arguments.read_arguments(tmp_path) == ("a", "c")
    (engine / "arg_utils.py").write_text("")
    assert arguments.read_arguments(tmp_path) == ()
