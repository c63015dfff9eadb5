"""The instance that a command is about, and shell completion of its names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from servekit.errors import ServekitError

if TYPE_CHECKING:
    from servekit.protocol.messages import FromSupervisor, Status, ToSupervisor

A = TypeVar("A", bound="FromSupervisor")

#: Timeout for completion: the user is waiting.
_COMPLETE_S = 1.0
_ANSWER_S = 10.0


def find_run_dir(run_dir: Path | None) -> Path:
    """Return the run directory of the instance, running or not.

    Raises StartError if there is none, or if several instances run and none is the default.
    """
    from servekit.supervisor.process.instances import find_last

    return find_last(run_dir, os.environ)


def find_instance(run_dir: Path | None) -> Path:
    """Return the run directory of the running instance. Raises StartError, as `find_run_dir`."""
    from servekit.supervisor.process.instances import find_run_dir

    return find_run_dir(run_dir, os.environ)


def ask_instance(
    run_dir: Path, message: ToSupervisor, kind: type[A], timeout_s: float = _ANSWER_S
) -> A:
    """Return the answer of the instance, which is of this kind. Raises ServekitError."""
    import asyncio

    from servekit.system.python.lean_start import import_structlog

    import_structlog()
    from servekit.supervisor.admin.control_socket import request_answer

    return asyncio.run(request_answer(run_dir, message, kind, timeout_s))


def read_status(run_dir: Path, timeout_s: float = _ANSWER_S) -> Status:
    """Return the status of the instance. Raises ServekitError if it does not answer."""
    from servekit.protocol.messages import GetStatus, Status

    return ask_instance(run_dir, GetStatus(), Status, timeout_s)


async def status_soon(run_dir: Path, timeout_s: float = _ANSWER_S) -> Status:
    """Return the status of the instance, from an event loop."""
    from servekit.protocol.messages import GetStatus, Status
    from servekit.supervisor.admin.control_socket import request_answer

    return await request_answer(run_dir, GetStatus(), Status, timeout_s)


def reachable_url(status: Status) -> str:
    """Return the URL of an instance on this machine: one of every interface is at loopback."""
    return status.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def resolve_alias(run_dir: Path, name: str, timeout_s: float = _ANSWER_S) -> str:
    """Return the name of the model that `name` is an alias of; other names unchanged."""
    try:
        models = read_status(run_dir, timeout_s).models
    except ServekitError:
        return name
    return next((model.name for model in models if name in model.names), name)


# ---- completion: names of the running instance; errors must stay silent


def complete_models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of models, including aliases and presets."""
    return _complete_names(ctx, incomplete, lambda found: _of_models(found))


def complete_workers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of models and of all processes."""
    return _complete_names(
        ctx, incomplete, lambda found: [*_of_models(found), *process_names(found)]
    )


def complete_profiles(ctx: typer.Context, incomplete: str) -> list[str]:
    return _complete_names(ctx, incomplete, lambda found: ["all", *found.profiles])


def complete_adapters(ctx: typer.Context, incomplete: str) -> list[str]:
    return _complete_names(
        ctx, incomplete, lambda found: [a.name for m in found.models for a in m.adapters]
    )


def process_names(found: Status) -> list[str]:
    """Return the names of workers, fork servers and gateways."""
    of_models = [one.name for model in found.models for one in (*model.replicas, *model.standbys)]
    return [*of_models, *(gateway.name for gateway in found.gateways)]


def _of_models(found: Status) -> list[str]:
    return [name for model in found.models for name in model.names]


def _complete_names(ctx: typer.Context, incomplete: str, read: Any) -> list[str]:
    try:
        run_dir = find_run_dir(ctx.params.get("run_dir"))
        found: list[str] = read(read_status(run_dir, _COMPLETE_S))
    except (ServekitError, OSError):  # no instance: no names
        return []
    return [name for name in found if name.startswith(incomplete)]
