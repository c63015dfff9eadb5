"""The interface to the installed vLLM is chosen, and said, before anything of it is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from servekit.config.engines.installed import is_there
from servekit.engines import create_engine
from servekit.engines.vllm import library
from servekit.errors import LoadError
from servekit.vllm_source import contract
from tests.unit.engines.harness import make_spec


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Install a vLLM that has all, or only the first, of two required classes."""
    (tmp_path / "vllm.py").write_text("class Core: ...")
    monkeypatch.setattr(library, "packages_folder", lambda: tmp_path)
    parts = contract.Required("vllm:Core"), contract.Required("vllm:Client")

    def install(version: str, *, whole: bool) -> None:
        monkeypatch.setattr(library, "vllm_version", lambda: version)
        monkeypatch.setattr(contract, "REQUIRED", parts[: 1 if whole else 2])

    return install


def choose(api: str = "auto") -> tuple[str, list[Any]]:
    """The module of the chosen class, and the warnings."""
    with capture_logs() as logs:
        target, libraries = library.choose_class(
            make_spec("/model", engine="vllm", options={"api": api})
        )
    module = target.partition(":")[0].rpartition(".")[2]
    assert ("vllm" in libraries) == (module == "engine")
    return module, [(one["event"], one.get("reason") or one["version"]) for one in logs]


LACKS = (
    "vLLM {} lacks what servekit uses of its core: it has no vllm.Client (there is no such class "
    "or function)"
)


def test_the_core_of_a_tested_release_is_used_silently(have: Any) -> None:
    have("0.30.0", whole=True)
    assert choose() == ("engine", [])


def test_the_core_of_an_untested_release_is_used_with_a_warning(have: Any) -> None:
    have("0.40.0", whole=True)
    assert choose() == ("engine", [("vllm_version_untested", "0.40.0")])


@pytest.mark.parametrize("version", ["0.30.0", "0.40.0"])
def test_a_release_that_lacks_something_is_served_by_its_server(have: Any, version: str) -> None:
    have(version, whole=False)
    assert choose() == ("server", [("vllm_served_by_its_server", LACKS.format(version))])
    with pytest.raises(LoadError) as caught:
        choose("core")
    assert (
        str(caught.value) == f"{LACKS.format(version)}; without `api: core` its own server serves."
    )


def test_the_server_can_be_asked_for(have: Any) -> None:
    have("0.30.0", whole=True)
    assert choose("server") == ("server", [])


@pytest.mark.skipif(is_there("vllm"), reason="vLLM is installed")
def test_a_missing_vllm_is_told_with_its_remedy() -> None:
    with pytest.raises(LoadError, match="vLLM is not installed: servekit engine install vllm"):
        create_engine(make_spec("/model", engine="vllm"))


@pytest.mark.skipif(not is_there("vllm"), reason="vLLM is not installed")
def test_the_installed_release_has_all_that_is_used() -> None:
    assert contract.find_lacking(library.packages_folder()) == []
    assert contract.is_tried(library.vllm_version())


def test_sockets_of_vllm_are_kept_beside_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "VLLM_RPC_BASE_PATH"
    monkeypatch.setenv(name, "")  # is restored at the end
    monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    room = 107 - len(".d/") - 36
    for socket in ("", "w" * (room + 1)):
        library.keep_sockets(make_spec("/model", engine="vllm", socket=socket))
        assert name not in os.environ and not list(tmp_path.iterdir())
    socket = "w" * room
    library.keep_sockets(make_spec("/model", engine="vllm", socket=socket))
    assert os.environ[name] == f"{socket}.d" and Path(f"{socket}.d").is_dir()
    monkeypatch.setenv(name, "/elsewhere")
    library.keep_sockets(make_spec("/model", engine="vllm", socket="w2.sock"))
    assert os.environ[name] == "/elsewhere"
