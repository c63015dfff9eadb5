"""Libraries that are fine, broken, deadly and endless, each imported for real in its child."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from servekit.diagnostics.packages import (
    check_extension,
    check_torch,
    check_versions,
    installed_modules,
    probe_modules,
)

LIBRARIES = {
    "fine": "__version__ = '1.2'\nprint('noise on stdout')",
    "broken": "raise ImportError('undefined symbol: _ZN3c10')",
    "leaving": "raise SystemExit(3)",
    "deadly": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "quitting": "import os; os._exit(4)",
    "silent": "import os; os._exit(0)",
}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in {**LIBRARIES, "endless": "import time; time.sleep(600)"}.items():
        (tmp_path / f"{name}.py").write_text(code)
    old = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{old}")
    return tmp_path


def test_each_is_told_apart(libraries: Path) -> None:
    said = probe_modules(list(LIBRARIES))
    assert said["fine"] == {"version": "1.2", "error": ""}
    assert said["broken"]["error"] == "ImportError: undefined symbol: _ZN3c10"
    assert said["leaving"]["error"] == "SystemExit: 3"
    assert said["deadly"]["error"] == "its import was killed by SIGSEGV"
    assert said["quitting"]["error"] == "its import ended the process with exit code 4"
    assert said["silent"]["error"] == "its import ended the process with exit code 0"


def test_one_that_hangs_holds_nobody_up(libraries: Path) -> None:
    before = time.monotonic()
    said = probe_modules(["endless"], patience_s=0.5)
    assert said["endless"]["error"] == "its import took more than 0.5 s"
    assert time.monotonic() - before < 20


def test_looking_what_is_there_imports_nothing(libraries: Path) -> None:
    assert installed_modules(["json", "no_such_library"]) == ["json"]


def test_a_folder_that_an_uninstallation_left_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_over" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_modules(["left_over", "json"]) == ["json"]


def test_what_is_said_of_an_extension() -> None:
    assert check_extension("xformers", {"version": "0.1", "error": ""}).said == "xformers 0.1"
    found = check_extension("xformers", {"version": "", "error": "ImportError: libcudart\nmore"})
    assert found.level == "warning"
    assert "(ImportError: libcudart); install the build that fits this torch" in found.said


def test_what_is_said_of_torch() -> None:
    ok = check_torch({"version": "2.13.0", "error": "", "cuda": "13.0"})
    assert ok.said == "torch 2.13.0, built for CUDA 13.0"
    assert check_torch({"version": "", "error": "OSError: libtorch.so"}).level == "error"
    none = check_torch(None)
    assert none.level == "ok" and "engine list" in none.said


def test_the_versions_are_those_that_are_installed() -> None:
    import importlib.metadata

    assert f"transformers {importlib.metadata.version('transformers')}" in check_versions().said
