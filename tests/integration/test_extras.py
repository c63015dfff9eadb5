"""Each extra can be installed, with and without the constraints file: the index is asked for all.

Nothing is installed. It takes the metadata of some hundred packages, hence a lane.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from servekit.engines.model_files.package_index import Settings

ROOT = Path(__file__).parents[2]
EXTRAS = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
#: What the Dockerfile says that may be given as EXTRAS.
IN_DOCKERFILE = re.findall(r"\[([a-z,]+)\]", (ROOT / "Dockerfile").read_text())


def resolved(extras: str, *more: str) -> str:
    """What pip would install. AssertionError where there is no such set of packages."""
    settings = Settings.of(os.environ)
    indexes = [arg for url in settings.indexes[1:] for arg in ("--index", url)]
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--no-header"),
        *(arg for extra in extras.split(",") if extra for arg in ("--extra", extra)),
        *("--default-index", settings.indexes[0], *indexes, "--no-config", "--no-annotate"),
        *("--index-strategy", "unsafe-best-match"),  # as pip takes them
        *("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", *more),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_dockerfile_names_extras_that_there_are() -> None:
    named = {extra for group in IN_DOCKERFILE for extra in group.split(",")}
    assert named and named <= set(EXTRAS)


@pytest.mark.lane("packages")
@pytest.mark.timeout(900)
def test_the_lowest_versions_can_be_resolved() -> None:
    found = resolved("", "--resolution", "lowest-direct")
    lowest = ("typer==0.20.0", "structlog==25.5.0", "msgspec==0.22.0", "uvicorn==0.53.0")
    assert all(f"\n{pin}\n" in f"\n{found}\n" for pin in lowest), found


@pytest.mark.lane("packages")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("extras", ["", *EXTRAS, *(e for e in IN_DOCKERFILE if "," in e)])
def test_each_can_be_resolved(extras: str, constrained: bool) -> None:
    pins = "deploy/constraints-vllm.txt" if "vllm" in extras else "deploy/constraints.txt"
    found = resolved(extras, *(("-c", pins) if constrained else ()))
    assert "torch==" in found and "fastapi==" in found
