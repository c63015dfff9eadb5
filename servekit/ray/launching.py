"""Selection of the launcher of workers by the configuration: none, or Ray."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from servekit.ray.launcher import Instance, RayLauncher
from servekit.ray.takeover import Takeover
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.lifecycle.managed_process import ManagedProcess, complete_before


def launcher_of(
    plan: Plan,
    host: Instance,
    run: Callable[[ManagedProcess[Any]], None],
    heritage: Takeover | None,
) -> RayLauncher | None:
    """Return the configured launcher; None if workers are children of the supervisor."""
    return RayLauncher(plan, host, run, heritage) if plan.config.launcher == "ray" else None


def grace_s(launcher: RayLauncher | None) -> float:
    """Return how long running processes may outlive the supervisor, in seconds."""
    return 0.0 if launcher is None else launcher.grace_s


async def open_launcher(
    launcher: RayLauncher | None, plan: Plan, until_told: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Open the launcher; return False if a shutdown was requested first."""
    return launcher is None or await complete_before(until_told(), launcher.open(plan))
