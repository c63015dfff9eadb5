"""Setup to join a Ray cluster and to find again what runs there."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.config.sections.cluster import RayConfig
from servekit.errors import StartError
from servekit.protocol.control.ray_messages import NodeRequirements
from servekit.protocol.transport.certificate_authority import Authority

#: File in the run directory that lets the next supervisor connect to the workers.
_AUTHORITY = "authority"
#: Timeout of a connection to the head node.
_REACH_S = 5.0


def ray_namespace(settings: RayConfig, run_dir: Path) -> str:
    """Return the Ray namespace of this instance's actors."""
    here = f"{socket.gethostname()}:{run_dir}"
    return settings.namespace or f"servekit-{hashlib.sha256(here.encode()).hexdigest()[:12]}"


def forget_authority(run_dir: Path) -> None:
    """Remove the authority, since nothing is left that could be taken over."""
    (run_dir / _AUTHORITY).unlink(missing_ok=True)


async def reach_head(address: str) -> None:
    """Connect to the head node as a test. Raises StartError: Ray itself takes minutes to fail."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: a name of a..b
        number = error.errno if isinstance(error, OSError) else None
        late = f"no answer in {_REACH_S:g} s" if isinstance(error, TimeoutError) else str(error)
        said = os.strerror(number) if number is not None and number > 0 else late
        raise StartError(
            f"no Ray cluster answers at {address} ({said}): start one there with `ray start"
            " --head`, or change `ray.address`"
        ) from None
    writer.close()


def load_authority(run_dir: Path) -> Authority:
    """Return the authority of a previous supervisor that was killed, or else a new one."""
    try:
        return Authority.from_bytes((run_dir / _AUTHORITY).read_bytes())
    except (OSError, StartError):
        return Authority.new("servekit")


def store_authority(run_dir: Path, authority: Authority) -> None:
    """Store the authority for the next supervisor, in one step. Raises OSError."""
    path = run_dir / _AUTHORITY
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(authority.to_bytes())
    fresh.replace(path)


def model_wants(models: Sequence[ModelConfig]) -> tuple[NodeRequirements, ...]:
    """Return what each model needs on a node: its engine, and its files unless they are fetched."""
    return tuple(map(model_want, models))


def model_want(model: ModelConfig) -> NodeRequirements:
    here = KINDS[model.engine].needs_files and Path(model.path).is_absolute()
    return NodeRequirements(model.name, model.engine, model.path if here else "")


def any_address(host: str) -> str:
    return "[::]" if ":" in host else "0.0.0.0"
