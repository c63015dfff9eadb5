"""The oldest SQLite beside which a supported torch can run: 3.26, of Red Hat Enterprise Linux 8.

Python takes the system's. The source is in a package of npm, and gcc makes the library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: It has the source of SQLite 3.26.0.
PACKAGE = "sqlite3@4.0.6"
STORES = (
    "tests/unit/gateway/storage",
    "tests/unit/supervisor/test_event_log.py",
    "tests/unit/supervisor/test_usage_ledger.py",
)

pytestmark = [
    pytest.mark.lane("packages"),
    pytest.mark.skipif(not (shutil.which("npm") and shutil.which("gcc")), reason="no npm, no gcc"),
]


def test_the_stores_work_with_an_old_sqlite(tmp_path: Path) -> None:
    env = os.environ | {"LD_LIBRARY_PATH": str(build_library(tmp_path))}
    version = "import sqlite3; print(sqlite3.sqlite_version)"
    told = run(sys.executable, "-c", version, env=env)
    if told.strip() != "3.26.0":
        pytest.skip(f"this Python has a SQLite of its own: {told}")
    run(sys.executable, "-m", "pytest", "-q", *STORES, env=env)


def build_library(folder: Path) -> Path:
    run("npm", "pack", "--silent", PACKAGE, cwd=folder)
    [package] = folder.glob("*.tgz")
    with tarfile.open(package) as outer:
        outer.extractall(folder, filter="data")
    [source] = folder.glob("package/deps/sqlite-autoconf-3260000.tar.gz")
    with tarfile.open(source) as inner:
        inner.extractall(folder, filter="data")
    [code] = folder.glob("sqlite-autoconf-*/sqlite3.c")
    # what the module of Python 3.11 asks for
    options = ("-O1", "-fPIC", "-shared", "-DSQLITE_ENABLE_DESERIALIZE", "-DSQLITE_SECURE_DELETE")
    made = ("-Wl,-soname,libsqlite3.so.0", "-o", str(folder / "libsqlite3.so.0"))
    run("gcc", *options, str(code), *made, "-lpthread", "-ldl", "-lm")
    return folder


def run(*command: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
