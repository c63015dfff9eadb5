"""What is installed, without importing any of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from servekit.config.checks import check_machine
from servekit.config.engines import installed
from servekit.config.engines.installed import Machine
from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from tests.unit.system.python.test_installation import install_slim


def test_a_module_is_there_if_it_could_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_one.py").write_text("raise SystemExit('it was imported')")
    (tmp_path / "acme_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed.is_there("acme_one")
    assert not installed.is_there("acme_folder")  # a folder that is merely called so
    assert not installed.is_there("acme_nothing")


def test_any_of_its_modules_will_do_and_the_first_is_used() -> None:
    kind = KINDS["llamacpp"]
    assert installed.find_module(kind, {"xllamacpp", "llama_cpp"}.__contains__) == "xllamacpp"
    assert installed.find_module(kind, {"llama_cpp"}.__contains__) == "llama_cpp"
    assert installed.install_command(kind, {"llama_cpp"}.__contains__) == ""
    assert (
        installed.install_command(kind, set[str]().__contains__)
        == "pip install 'servekit[llamacpp]'"
    )
    assert installed.install_command(KINDS["echo"], set[str]().__contains__) == ""


def test_each_engine_is_listed_and_none_is_imported() -> None:
    before = set(sys.modules)
    listed = dict(installed.list_engines())
    assert listed["transformers"].startswith("transformers ")
    assert listed["echo"] == "comes with servekit"
    assert set(listed) >= set(KINDS)
    assert not {"vllm", "xllamacpp", "llama_cpp"} & (set(sys.modules) - before)


def test_the_slim_package_is_told_of_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`servekit[vllm]` would put the whole package beside it, whose files are the same."""
    install_slim(tmp_path, monkeypatch)
    monkeypatch.setattr(installed, "install_command", lambda kind: "pip install it")
    assert dict(installed.list_engines())["vllm"] == "not installed: servekit engine install vllm"
    config = ModelConfig.model_validate({"name": "a", "path": "o/a", "engine": "vllm"})
    [found] = check_machine(config, (), Machine(has_gpu=True, has=set[str]().__contains__))
    assert found.message.endswith("servekit engine install vllm makes an environment for it.")
