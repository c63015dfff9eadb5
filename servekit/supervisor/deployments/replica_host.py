"""The interface that the deployment manager offers to each deployment."""

from __future__ import annotations

from typing import Protocol

from servekit.config.schema import ModelConfig
from servekit.supervisor.lifecycle.managed_process import SupervisorContext
from servekit.supervisor.scheduling.gpu_admission import GpuAdmission
from servekit.supervisor.workers.fork_server import ForkServer
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpus import Gpu, Slot


class ReplicaHost(Protocol):
    """The deployment manager, as a deployment sees it."""

    @property
    def host(self) -> SupervisorContext: ...
    @property
    def gpus(self) -> tuple[Gpu, ...]: ...
    @property
    def drain_timeout_s(self) -> float: ...
    def start(self, life: WorkerProcess | ForkServer) -> None: ...
    @property
    def gate(self) -> GpuAdmission: ...
    def claims(self, model: ModelConfig, slot: Slot) -> tuple[int, ...]: ...
    def needs(self, model: ModelConfig, slot: Slot) -> tuple[int, ...]: ...
    def has_room(self, model: ModelConfig, slot: Slot) -> bool: ...
    def is_taken(self, name: str) -> bool: ...
