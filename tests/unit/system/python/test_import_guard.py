"""The guard of supervisor and gateway, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


GUARDED = (
    "from servekit.system.python.import_guard import install_guard; install_guard('gateway')\n"
)


def test_the_chain_of_imports_is_named(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text("import inner")
    (tmp_path / "inner.py").write_text("def f():\n    import torch.nn\nf()")
    done = python(f"{GUARDED}import outer", tmp_path)
    assert done.returncode == 1
    said = "torch was imported in the gateway, which stays without CUDA: "
    assert f"{said}__main__ → outer → inner → torch\n" in done.stderr


def test_importlib_is_no_way_around(tmp_path: Path) -> None:
    done = python(f"{GUARDED}import importlib; importlib.import_module('torch')", tmp_path)
    assert "CUDA: __main__ → torch\n" in done.stderr


@pytest.mark.parametrize("name", ["torch", "torch.cuda", "peft", "transformers"])
def test_an_optional_use_goes_on_without(name: str, tmp_path: Path) -> None:
    code = f"{GUARDED}try:\n    import {name}\nexcept ImportError:\n    print('without')"
    code += "\nimport sys; print([n for n in sys.modules if n.startswith(('torch', 'peft'))])"
    done = python(code, tmp_path)
    assert done.stdout.split("\n")[:2] == ["without", "[]"], done.stderr


def test_a_probe_is_told_the_truth(tmp_path: Path) -> None:
    probe = "import importlib.util as u; print([u.find_spec(n) is None for n in ('torch', 'cupy')])"
    done = python(f"{GUARDED}{probe}", tmp_path)
    assert done.stdout.strip() == "[False, True]"


def test_what_is_not_installed_is_as_ever(tmp_path: Path) -> None:
    done = python(f"{GUARDED}import cupy", tmp_path)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'cupy'\n")


def test_it_comes_too_late_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    done = python(f"import torch\n{GUARDED}", tmp_path)
    assert "torch was imported in the gateway before its guard" in done.stderr


def test_within_a_block_only(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    code = "from servekit.system.python.import_guard import guard_process\n"
    code += "with guard_process('supervisor'): import json\n"
    assert python(f"{code}import torch", tmp_path).returncode == 0


@pytest.mark.lane("long")
@pytest.mark.slow
def test_the_gateway_with_its_page_loads_under_it(tmp_path: Path) -> None:
    code = f"{GUARDED}import servekit.gateway.server, servekit.gateway.ui.chat_page"
    done = python(f"{code}\nimport sys; print('gradio' in sys.modules)", tmp_path)
    assert done.stdout.strip() == "True", done.stderr
