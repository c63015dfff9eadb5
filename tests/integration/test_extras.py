"""Each extra can be installed, with and without the constraints file: the index is asked for all.

The slim package is installed, and serves. It takes the metadata of some hundred packages, hence a
lane.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement

from servekit.engines.model_files.package_index import Settings
from tests.integration.instance import Instance, echo, write_config
from tests.unit.engines.origins import SMOLLM2

ROOT = Path(__file__).parents[2]
EXTRAS = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
#: What the Dockerfile says that may be given as EXTRAS.
IN_DOCKERFILE = re.findall(r"\[([a-z,]+)\]", (ROOT / "Dockerfile").read_text())


def read_project(file: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / file).read_text())
    return found


def test_the_slim_package_lacks_the_libraries_of_an_engine_and_nothing_else() -> None:
    whole, slim = read_project("pyproject.toml"), read_project("deploy/slim/pyproject.toml")
    names = {Requirement(text).name: text for text in whole["project"]["dependencies"]}
    for engine_library in ("torch", "transformers", "accelerate", "peft"):
        names.pop(engine_library)
    assert slim["project"]["dependencies"] == list(names.values())
    for key in ("version", "requires-python", "license", "scripts"):
        assert slim["project"][key] == whole["project"][key]
    extras = whole["project"]["optional-dependencies"]
    of_engines = {"llamacpp", "vllm", "audio", "faster-whisper", "quantization", "test", "lanes"}
    assert slim["project"]["optional-dependencies"] == {
        extra: extras[extra] for extra in extras if extra not in of_engines
    }
    parts = whole["tool"]["setuptools"], slim["tool"]["setuptools"]
    assert parts[0]["package-data"] == parts[1]["package-data"]
    assert parts[0]["packages"]["find"]["include"] == parts[1]["packages"]["find"]["include"]


@pytest.mark.lane("packages")
@pytest.mark.timeout(900)
def test_the_slim_package_serves_with_the_engine_of_another_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "slim", symlinks=True, with_pip=True)
    python = tmp_path / "slim" / "bin" / "python"
    packages = ("-c", "deploy/constraints.txt", "./deploy/slim")
    made = subprocess.run(
        [python, "-m", "pip", "install", "-q", *packages], cwd=ROOT, capture_output=True, text=True
    )
    shutil.rmtree(ROOT / "deploy/slim/build", ignore_errors=True)
    assert made.returncode == 0, made.stderr
    there = {path.name for path in python.parents[1].glob("lib/python*/site-packages/*")}
    assert "servekit" in there and not there & {"torch", "transformers", "accelerate", "peft"}
    model = {"name": "m", "path": SMOLLM2}
    run = partial(
        subprocess.run, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60
    )
    refused = run([python, "-m", "servekit", "check", write_config(tmp_path, [model])])
    assert "servekit engine install transformers makes an environment for it." in refused.stderr
    assert "pip install" not in refused.stderr
    doctor = run([python, "-m", "servekit", "doctor"])
    assert "not in servekit's own environment" in doctor.stdout, doctor.stderr
    models = [model | {"python": sys.executable}, echo("e")]
    program = (str(python), "-m", "servekit")
    with Instance.up(tmp_path, models, program=program, server={"ui": True}) as instance:
        url = instance.until_settled(300).url
        body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 0}, timeout=60)
        assert answer.json()["choices"][0]["text"].startswith(" Paris")
        assert httpx.get(f"{url}/ui", follow_redirects=True).status_code == 200


def resolved(extras: str, *more: str) -> str:
    """What pip would install. AssertionError where there is no such set of packages."""
    settings = Settings.from_environ(os.environ)
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
