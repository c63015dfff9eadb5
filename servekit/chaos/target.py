"""The instance under test: its status, and its processes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servekit.chaos.client import KEY_VARIABLE, NO_KEY, Client
from servekit.config.load import load_config
from servekit.config.schema import ModelConfig
from servekit.errors import ConfigError, ServekitError, StartError
from servekit.protocol.messages import GetStatus, ModelStatus, ReplicaStatus, Status
from servekit.supervisor.admin.control_socket import request_answer
from servekit.supervisor.process.run_dir import no_instance_error, read_record
from servekit.system import procfs
from servekit.system.orphan_cleanup import MARK

_LOOK_EVERY_S = 0.02
_ANYWHERE = {"0.0.0.0", "::", "127.0.0.1", "::1", "localhost"}


class Target:
    """A model of a running instance of this user. Made by `find_target`."""

    def __init__(self, url: str, run_dir: Path, status: Status, model: str, mark: str) -> None:
        self.client = Client(url, os.environ.get(KEY_VARIABLE) or NO_KEY)
        self.run_dir = run_dir
        self.pid = status.pid
        self.config_path = Path(status.config)
        self.name = model
        self._mark = f"{MARK}={mark}"

    @classmethod
    async def find_target(cls, url: str, run_dir: Path, model: str | None) -> Target:
        """Return the target. Raises StartError unless `url` is the user's instance of `run_dir`.

        Also for one that speaks HTTPS, as the measuring client does not, and one with processes on
        other machines: here their PIDs are those of others.
        """
        record = read_record(run_dir)
        status = await _read_status(run_dir)
        if record is None or record.pid != status.pid:
            raise no_instance_error(run_dir)
        if not is_same_address(url, status.url):
            raise StartError(
                f"the instance of {run_dir} serves {status.url}, not {url}; "
                "name the right one with --run-dir"
            )
        if status.url.startswith("https:"):
            raise StartError(
                f"the instance of {run_dir} speaks HTTPS, and chaos does not: start one without"
                " server.tls"
            )
        if not _is_ours(status.pid):
            raise StartError(f"the instance of {run_dir} is not yours")
        if _is_remote(status):
            raise StartError(
                f"processes of the instance in {run_dir} run in a Ray cluster, and chaos sends "
                "signals on this machine only: start one without `launcher: ray`"
            )
        names = [found.name for found in status.models]
        if model is not None and model not in names:
            raise ConfigError(f"there is no model {model!r}; there are: {', '.join(names)}")
        return cls(url, run_dir, status, model or names[0], record.mark)

    # ---- status

    async def read_status(self) -> Status:
        return await _read_status(self.run_dir)

    async def model(self) -> ModelStatus:
        return next(m for m in (await self.read_status()).models if m.name == self.name)

    async def ready_replicas(self) -> list[ReplicaStatus]:
        return [r for r in (await self.model()).replicas if r.state == "ready"]

    def settings(self) -> ModelConfig | None:
        """Return the model's section of the current file; None if the file is gone or invalid."""
        try:
            models = load_config(self.config_path).models
        except ServekitError:
            return None
        return next((model for model in models if model.name == self.name), None)

    def option(self, name: str) -> Any:
        """Return a setting of the model, engine options included; None if it is not set."""
        settings = self.settings()
        if settings is None:
            return None
        found = getattr(settings, name, None)
        return settings.options.get(name) if found is None else found

    # ---- waiting

    async def await_status(
        self, true_of: Callable[[Status], bool], within_s: float
    ) -> float | None:
        """Return the seconds until the status meets a condition; None after a timeout."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < within_s:
            if true_of(await self.read_status()):
                return passed
            await asyncio.sleep(_LOOK_EVERY_S)
        return None

    async def until_whole(self, within_s: float, without: int = 0) -> float | None:
        """Return the seconds until all serves, with the process `without` replaced; None after a
        timeout.
        """
        began = time.monotonic()
        if await self.await_status(lambda status: is_whole(status, without), within_s) is None:
            return None
        while (passed := time.monotonic() - began) < within_s:
            if (await self.client.get("/readyz")).status == 200:
                return passed
            await asyncio.sleep(_LOOK_EVERY_S)
        return None

    # ---- processes

    def list_processes(self) -> list[procfs.Process]:
        """Return all living processes of the instance: the supervisor, processes with its mark, and
        their
        descendants.
        """
        found = {process.pid: process for process in procfs.find_marked(self._mark)}
        living = list(procfs.all_processes())
        found |= {process.pid: process for process in living if process.pid == self.pid}
        for _ in living:  # bounds the depth of the tree
            children = [p for p in living if p.parent in found and p.pid not in found]
            if not children:
                break
            found |= {process.pid: process for process in children}
        return list(found.values())

    def ports_held_by(self, pid: int) -> set[int]:
        """Return the remote ports of the TCP connections that a process holds. Source: proc(5)."""
        inodes = set()
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                inodes.add(os.readlink(entry.path).removeprefix("socket:[").rstrip("]"))  # noqa: PTH115
            except OSError:
                continue
        return {port for port, inode in _tcp_connections(pid) if port and inode in inodes}

    def gateway_events(self, since: float) -> Iterator[dict[str, Any]]:
        """Yield the gateways' log events since then (Unix time), with `at` added as Unix time."""
        for path in sorted((self.run_dir / "logs").glob("gateway-*.log*")):
            for line in path.read_text(errors="replace").splitlines():
                if (event := _parse_line(line)) is not None and event["at"] >= since:
                    yield event

    def await_loss_noticed(self, worker: str, since: float) -> float | None:
        """Return the seconds from `since` until the last gateway noticed the loss of a worker."""
        times = [
            event["at"]
            for event in self.gateway_events(since)
            if event.get("event") == "worker_lost" and event.get("worker") == worker
        ]
        return max(times) - since if times else None


def is_whole(status: Status, without: int = 0) -> bool:
    """Return whether every replica and gateway is ready, and none is the process `without`."""
    children = [
        *((gateway.state, gateway.pid) for gateway in status.gateways),
        *((replica.state, replica.pid) for model in status.models for replica in model.replicas),
    ]
    return all(state == "ready" and pid != without for state, pid in children)


def describe_lacking(status: Status) -> str:
    """Describe the replicas and gateways that do not serve; "" if all do."""
    found = [f"{one.name} is {one.state}" for one in status.gateways if one.state != "ready"]
    found += [
        f"{replica.name} is {replica.state}" + (f": {replica.reason}" if replica.reason else "")
        for model in status.models
        for replica in model.replicas
        if replica.state != "ready"
    ]
    return "; ".join(found)


async def _read_status(run_dir: Path) -> Status:
    return await request_answer(run_dir, GetStatus(), Status)


def _is_remote(status: Status) -> bool:
    replicas = (replica for model in status.models for replica in model.replicas)
    return any(replica.socket.startswith("tcp:") for replica in replicas) or any(
        gateway.node for gateway in status.gateways
    )


def _is_ours(pid: int) -> bool:
    return Path(f"/proc/{pid}").stat().st_uid == os.getuid()


def is_same_address(asked: str, serves: str) -> bool:
    """Return whether a URL is that of the instance, which may listen on all addresses."""
    one, other = urlsplit(asked), urlsplit(serves)
    if (one.port or 80) != (other.port or 80):
        return False
    return one.hostname == other.hostname or {one.hostname, other.hostname} <= _ANYWHERE


def _tcp_connections(pid: int) -> Iterator[tuple[int, str]]:
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            yield int(fields[2].rsplit(":", 1)[1], 16), fields[9]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        event: dict[str, Any] = json.loads(line)
        event["at"] = datetime.fromisoformat(event["timestamp"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return None
    return event
