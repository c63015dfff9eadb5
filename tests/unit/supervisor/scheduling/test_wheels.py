"""What `check` and `doctor` say of wheels that are not here, with package indexes on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.supervisor.deployments.plan import Source
from servekit.supervisor.scheduling.wheels import WheelFinding, look_up
from tests.integration.instance import write_config
from tests.unit.engines.origins import Handler, http_server

NAME = "tiny_model-1.0-py3-none-any.whl"
SIZE_BYTES = 3 * 2**20


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this machine's own settings and caches."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "PIP_NO_INDEX",
        "UV_INDEX",
        "UV_EXTRA_INDEX_URL",
    ):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def index(size_bytes: int = SIZE_BYTES, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """An index with version 1.0 of tiny-model."""
    file = {"filename": NAME, "url": f"/files/{NAME}", "hashes": {}, "size": size_bytes}

    def answer(handler: Handler) -> None:
        page = json.dumps({"files": [file]}).encode()
        if status == 200 and handler.path != "/simple/tiny-model/":
            handler.send(404, b"", "text/html")
        else:
            handler.send(status, page, "application/vnd.pypi.simple.v1+json")

    with http_server(answer) as (url, asked):
        yield f"{url.replace('//', '//me:secret@')}/simple", asked


def told(folder: Path, *paths: str, patience_s: float = 60.0) -> list[WheelFinding]:
    models = [
        {"name": f"m{at}", "engine": "llamacpp", "path": path, "memory": "1GiB"}
        for at, path in enumerate(paths)
    ]
    found = look_up(Source(write_config(folder, models)).plan(()), patience_s)
    assert not any("secret" in one.said for one in found)
    return found


def test_versions_that_are_there_and_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index() as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        there, other, none = told(
            tmp_path, "pypi:tiny_model==1.0", "pypi:tiny-model==2.0/a.gguf", "pypi:nobody==1/m"
        )
    assert (there.level, there.place) == ("ok", "models[0].path: m0")
    assert there.said == "tiny-model==1.0 will be fetched: 3 MiB; the disk has room."
    assert other.level == none.level == "error"
    assert "has no tiny-model==2.0: it has 1.0" in other.said
    assert "it has no wheel of nobody" in none.said


def test_a_disk_without_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with index(size_bytes=2**60) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        [found] = told(tmp_path, "pypi:tiny-model==1.0")
    assert (found.level, "are free in" in found.said) == ("warning", True)


@pytest.mark.parametrize("status", [401, 403, 503])
def test_an_index_that_refuses_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with index(status=status) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        [found] = told(tmp_path, "pypi:tiny-model==1.0")
    assert (found.level, str(status) in found.said) == ("warning", True)


def test_an_index_that_is_not_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{port}/simple")
    [found] = told(tmp_path, "pypi:tiny-model==1.0")
    assert (found.level, "cannot be reached" in found.said) == ("warning", True)


def test_an_index_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    with http_server(lambda handler: (over.wait(60), None)[1]) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        found = told(tmp_path, *[f"pypi:tiny-model=={at}" for at in range(3)], patience_s=0.5)
        over.set()
    assert [one.level for one in found] == ["warning"] * 3
    assert "did not answer" in found[0].said


@pytest.mark.parametrize("name", ["PIP_NO_INDEX", "HF_HUB_OFFLINE"])
def test_who_is_offline_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with index() as (url, asked):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv(name, "1")
        [found] = told(tmp_path, "pypi:tiny-model==1.0")
    assert (found.level, name in found.said, asked) == ("warning", True, [])


def test_what_is_here_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / "cache/servekit/models/tiny"
    entry.mkdir(parents=True)
    identity = ["fetched", "pypi", "tiny-model", "1.0", "m.gguf"]
    (entry / ".servekit.json").write_text(json.dumps({"identity": identity, "files": {}}))
    assert told(tmp_path, "pypi:tiny-model==1.0/m.gguf", "o/n/m.gguf") == []
