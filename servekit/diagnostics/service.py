"""Checks of an instance's prerequisites: its file, ports, run directory and cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from servekit.config.schema import Config, ServerConfig
from servekit.diagnostics.finding import Finding
from servekit.diagnostics.host import check_disk
from servekit.errors import ConfigError, NobodyRuns, ServekitError, StartError
from servekit.protocol.messages import GetStatus, Status
from servekit.supervisor.admin.control_socket import request_answer
from servekit.supervisor.deployments.plan import Plan, Source
from servekit.supervisor.process.run_dir import default_paths, read_record
from servekit.supervisor.scheduling.fetch_checks import look_up
from servekit.system import procfs, sockets
from servekit.system.gpu.gpus import Gpu
from servekit.system.user_dirs import find_models_cache

_RUN_DIR_BYTES = 100 * 2**20
_CACHE_BYTES = 10 * 2**30
#: How long the supervisor may take to answer.
_ANSWER_S = 5.0
_ON_TORCH = {"transformers", "vllm"}


def check_service(
    file: Path | None, run_dir: Path | None, gpus: Sequence[Gpu], torch: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """Check a start with `file`; without one, a start with the defaults."""
    config = None
    if file is not None:
        try:
            plan = Source(file.absolute()).plan(gpus)
        except ConfigError as error:
            yield Finding("configuration", "error", error.message)
        else:
            config = plan.config
            yield check_configuration(file, plan, torch)
            for told in look_up(plan):
                yield Finding(told.source, told.level, f"{told.place}: {told.said}")
    folder = run_dir or (config and config.run_dir) or default_paths(os.environ)[0]
    yield from check_ports(config, folder)
    yield check_disk("run directory", folder, _RUN_DIR_BYTES)
    yield check_disk("cache", find_models_cache(os.environ), _CACHE_BYTES)


def check_configuration(file: Path, plan: Plan, torch: Mapping[str, Any] | None) -> Finding:
    """Check that servekit's own torch can use the GPUs of the models that run with it.

    The GPUs exist, as the plan succeeded. Models with an environment of their own have another.
    """
    if plan.config.launcher == "ray":
        said = f"{file}: {len(plan.places)} workers, which Ray places"
        return Finding("configuration", "ok", said)
    on_gpu = [place.name for place in plan.places if place.gpus]
    real = {m.name for m in plan.config.models if m.engine in _ON_TORCH and not m.python}
    needs = [place.name for place in plan.places if place.gpus and place.model in real]
    if needs and (torch is None or torch["error"] or not torch.get("cuda")):
        said = f"{file}: {', '.join(needs)} would run on a GPU, which this torch cannot use"
        return Finding("configuration", "error", f"{said}; install one that is built for CUDA")
    where = f"{len(on_gpu)} on GPUs, {len(plan.places) - len(on_gpu)} on the CPU"
    return Finding("configuration", "ok", f"{file}: {len(plan.places)} workers, {where}")


def check_ports(config: Config | None, run_dir: Path) -> Iterator[Finding]:
    server = config.server if config else ServerConfig()
    if (found := check_instance(run_dir)) is not None:
        yield found
        return
    for port in (server.port, server.legacy_port):
        if port is not None:
            yield check_port(server.host, port)


def check_instance(run_dir: Path) -> Finding | None:
    """Check that the instance of a run directory answers; None if none runs there."""
    if (record := read_record(run_dir)) is None:
        return None
    said = f"an instance (pid {record.pid}) runs in {run_dir} at {record.url}"
    try:
        asyncio.run(request_answer(run_dir, GetStatus(), Status, _ANSWER_S))
    except NobodyRuns:
        return None
    except ServekitError as error:
        stopped = (process := procfs.read_process(record.pid)) and process.state in "Tt"
        advice = f"it is stopped: kill -CONT {record.pid}" if stopped else "its log may say why"
        return Finding("port", "error", f"{said}, and {error.message}; {advice}")
    return Finding("port", "ok", said)


def check_port(host: str, port: int) -> Finding:
    """Check that a port is free, by listening on it for a moment."""
    try:
        sockets.bind_listener(host, port).close()
    except StartError as error:
        return Finding("port", "error", error.message)
    return Finding("port", "ok", f"{host}:{port} is free" if port else "any free port")
