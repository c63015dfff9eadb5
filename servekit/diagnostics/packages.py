"""Checks of versions and imports: each library in its own child, two at a time."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import servekit
from servekit.config.engines import installed
from servekit.config.engines.environments import engines_of, list_environments
from servekit.diagnostics.finding import Finding
from servekit.system.procfs import name_signal
from servekit.system.python import python_command

#: Modules compiled against a version of torch, CUDA or a C library, which often break with another.
EXTENSIONS = (
    "flash_attn",
    "flash_attn_interface",
    "bitsandbytes",
    "xformers",
    "causal_conv1d",
    "mamba_ssm",
    "deepspeed",
    "triton",
    "vllm",
    "llama_cpp",
    "xllamacpp",
    "ctranslate2",
    "llguidance",
    "tokenizers",
    "safetensors",
)
_NAMED = ("transformers", "accelerate", "peft", "gradio", "nvidia-ml-py")
#: Timeout of an import; a cold import of torch on a busy disk may take most of it.
PATIENCE_S = 90.0

Probed = Mapping[str, Mapping[str, Any]]


def probe_modules(
    names: Sequence[str], patience_s: float = PATIENCE_S
) -> dict[str, dict[str, Any]]:
    """Import each module in a child; return its `version` and `error`. See `probe.py` for torch."""
    with ThreadPoolExecutor(2) as pool:  # limited by the disk
        return dict(
            zip(names, pool.map(lambda n: _probe_module(n, patience_s), names), strict=True)
        )


def _probe_module(name: str, patience_s: float) -> dict[str, Any]:
    command = [*python_command.module_command("servekit.diagnostics.probe"), name]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=patience_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"version": "", "error": f"its import took more than {patience_s:g} s"}
    if done.returncode != 0 or not done.stdout:
        return {"version": "", "error": f"its import {_describe_death(done.returncode)}"}
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _describe_death(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {name_signal(-returncode)}"
    return f"ended the process with exit code {returncode}"


def installed_modules(names: Sequence[str]) -> list[str]:
    """Return the modules that are installed, without importing them.

    A folder without a module, as an uninstallation may leave it, is none.
    """
    found = ((name, importlib.util.find_spec(name)) for name in names)
    return [name for name, spec in found if spec is not None and spec.origin is not None]


def check_versions() -> Finding:
    found = [f"servekit {servekit.__version__}", f"Python {platform.python_version()}"]
    for name in _NAMED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Finding("versions", "ok", ", ".join(found))


def check_software(probed: Probed) -> Iterator[Finding]:
    yield check_versions()
    yield from check_engines()
    for name, said in probed.items():
        if name != "torch":
            yield check_extension(name, said)
    yield check_torch(probed.get("torch"))


def check_engines() -> Iterator[Finding]:
    """List the available engines, those of other environments, and the unusable plugins."""
    for name, what in installed.list_engines():
        yield Finding("engines", "ok", f"{name}: {what}")
    for folder, found in list_environments(os.environ):
        if isinstance(found, str):
            yield Finding("engines", "warning", f"{folder}: {found}")
        else:
            there = ", ".join(engines_of(found)) or "none of servekit's own"
            yield Finding("engines", "ok", f"python: {folder.name}: {there}")
    for sentence in installed.refused_plugins():
        yield Finding("engines", "warning", sentence)


def check_extension(name: str, said: Mapping[str, Any]) -> Finding:
    if said["error"]:
        first = said["error"].splitlines()[0]
        return Finding(
            "extensions",
            "warning",
            f"{name} is installed and cannot be imported ({first}); install the build that fits "
            "this torch, or remove it",
        )
    return Finding("extensions", "ok", f"{name} {said['version']}".rstrip())


def check_torch(said: Mapping[str, Any] | None) -> Finding:
    """Check the probed torch; None: it is not in servekit's own environment."""
    if said is None:
        return Finding(
            "torch",
            "ok",
            "not in servekit's own environment: workers find it in their engine's "
            "(`servekit engine list`)",
        )
    if said["error"]:
        first = said["error"].splitlines()[0]
        return Finding(
            "torch", "error", f"torch cannot be imported ({first}); pip install it again"
        )
    build = f"for CUDA {said['cuda']}" if said["cuda"] else "for the CPU only"
    return Finding("torch", "ok", f"torch {said['version']}, built {build}")
