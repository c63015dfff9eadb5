"""The folder by which an engine's own environment finds servekit, and nothing else of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import structlog

import servekit
from servekit.system.python.worker_code import BROUGHT, make_code_folder

PACKAGE = Path(servekit.__file__).resolve().parent
STRUCTLOG = Path(structlog.__file__).resolve().parent


def links(folder: Path) -> dict[str, Path]:
    return {one.name: one.readlink() for one in folder.iterdir()}


def test_the_folder_has_servekit_and_what_the_environment_lacks(tmp_path: Path) -> None:
    assert links(make_code_folder(tmp_path / "a" / "b", ())) == {"servekit": PACKAGE}
    both = make_code_folder(tmp_path, BROUGHT)
    assert links(both) == {"servekit": PACKAGE, "structlog": STRUCTLOG}


def test_environments_that_lack_different_packages_share_no_folder(tmp_path: Path) -> None:
    plain, lacking = make_code_folder(tmp_path, ()), make_code_folder(tmp_path, ["structlog"])
    assert plain != lacking
    assert plain.parent == lacking.parent == tmp_path
    assert make_code_folder(tmp_path, {"structlog"}) == lacking


def test_an_interpreter_without_packages_finds_servekit_there(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(make_code_folder(tmp_path, BROUGHT))}
    code = "import servekit, structlog, importlib.util as u; print(servekit.__file__, end='|');"
    code += "print(structlog.__file__, end='|'); print(u.find_spec('msgspec'))"
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    servekit_file, structlog_file, other = done.stdout.strip().split("|")
    assert Path(servekit_file).resolve() == PACKAGE / "__init__.py"
    assert Path(structlog_file).resolve() == STRUCTLOG / "__init__.py"
    assert other == "None", "no other package of ours can be imported"


def test_a_link_to_an_earlier_installation_is_renewed_and_a_right_one_kept(tmp_path: Path) -> None:
    folder = make_code_folder(tmp_path, ())
    link = folder / "servekit"
    before = link.lstat().st_ino
    make_code_folder(tmp_path, ())
    assert link.lstat().st_ino == before
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    (folder / f".servekit.{os.getpid()}").symlink_to("left by a process that was killed")
    make_code_folder(tmp_path, ())
    assert links(folder) == {"servekit": PACKAGE}


def test_what_is_no_link_is_replaced_by_one(tmp_path: Path) -> None:
    folder = make_code_folder(tmp_path, ())
    (folder / "servekit").unlink()
    (folder / "servekit").write_text("")
    make_code_folder(tmp_path, ())
    assert links(folder) == {"servekit": PACKAGE}
