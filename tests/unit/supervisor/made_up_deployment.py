"""A fleet that does nothing but remember what it was told, for those who decide over one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from servekit.config.schema import ModelConfig
from servekit.protocol.messages import ModelInfo
from servekit.supervisor.deployments.config_diff import Slots
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.lifecycle.exit_history import StartReason

GIB = 2**30


def config(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {"name": "a", "path": "p", "engine": "echo", "load": "on_demand", **keys}
    )


def info(
    *, sleeps: bool = True, parameters: int = 0, weights_bytes: int = 0, dtype: str = "float16"
) -> ModelInfo:
    return ModelInfo(
        *(100, 1, False, "echo", dtype, "cpu"),
        parameters,
        sleeps=sleeps,
        weights_bytes=weights_bytes,
    )


@dataclass
class Gpu:
    lacking: Mapping[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Replica:
    """A worker; `refuses` is why it does not do as it is told."""

    name: str
    state: str = "ready"
    reason: str = ""
    rss_bytes: int = 0
    refuses: str = ""
    place: Any = field(default_factory=lambda: SimpleNamespace(gpus=()))
    gpu: Gpu = field(default_factory=Gpu)

    @property
    def serves(self) -> bool:
        return self.state == "ready"

    async def sleep(self, told: Callable[[], Awaitable[None]]) -> str:
        await told()
        self.state = self.state if self.refuses else "asleep"
        return self.refuses

    async def wake(self) -> str:
        self.state = self.state if self.refuses else "ready"
        return self.refuses


@dataclass(eq=False)
class MadeUp:
    """With `replicas` that stand as the test says."""

    model: ModelConfig
    wanted: bool = False
    replicas: list[Replica] = field(default_factory=list)
    planned: Slots = ((),)
    info: ModelInfo | None = None
    told: list[str] = field(default_factory=list)
    left_out: str = ""
    changing: bool = False

    @property
    def living(self) -> list[Replica]:
        return self.replicas

    @property
    def real(self) -> Deployment:
        return cast(Deployment, self)

    def have(self, *states: str) -> None:
        """These replicas."""
        self.wanted = bool(states)
        self.replicas = [Replica(f"a/{n}", state) for n, state in enumerate(states)]
        self.planned = ((),) * max(1, len(states))

    def load(self, occasion: StartReason) -> None:
        self.told.append("load")
        self.have("starting")

    def unload(self, *, returns: bool = False) -> None:
        self.told.append("unload")
        self.have()

    def try_again(self) -> None:
        self.told.append("try again")

    def changed(self) -> None: ...
