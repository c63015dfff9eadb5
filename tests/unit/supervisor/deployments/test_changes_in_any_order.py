"""Reloads, restarts and operators in any order over one deployment, while its workers come and go.

The workers are real, but no task runs them: each changes its state as the test says.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.supervisor.deployments.config_diff import same_worker
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.workers.worker_process import WorkerProcess
from tests.unit.supervisor.deployments.test_deployment import make_pool, settle
from tests.unit.supervisor.made_up_deployment import config

DEEDS = st.one_of(
    st.tuples(st.just("reload"), st.sampled_from("ab"), st.integers(1, 2), st.integers(5, 6)),
    st.tuples(st.just("restart"), st.integers(0, 2)),
    st.tuples(st.just("load")),
    st.tuples(st.just("unload")),
    st.tuples(st.sampled_from(["serve", "serve", "fail", "end"]), st.integers(0, 5)),
)


class Scene:
    """A deployment of a model that is loaded on start, on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.deployment = Deployment(config(path="a", load="on_start"), make_pool(folder))
        self.reload("a", 1, 5)

    def reload(self, path: str, count: int, max_queue: int) -> None:
        model = config(path=path, load="on_start", max_queue=max_queue)
        self.deployment.roll_out(model, ((),) * count, 1)

    def serving(self) -> list[WorkerProcess]:
        return [one for one in self.deployment.living if one.state == "ready"]

    async def do(self, deed: tuple[Any, ...]) -> None:
        serving, deployment = self.serving(), self.deployment
        match deed:
            case ("reload", path, count, max_queue):
                self.reload(path, count, max_queue)
            case ("restart", at):
                if deployment.wanted and deployment.living and not deployment.changing:
                    deployment.restart(deployment.living[at:][:1] or deployment.living)
            case ("load",):
                deployment.load(StartReason.from_now("operator"))
            case ("unload",):
                deployment.unload()
            case (event, at):
                self.happen(event, at)
        await settle()
        if deed[0] in ("reload", "restart", "load") and serving:
            assert self.serving(), "none serves while the others load"
        if deed[0] == "fail" and len(serving) > 1:
            assert self.serving(), "what has failed takes none with it that serves"

    def happen(self, event: str, at: int) -> None:
        """Have something happen to one of the workers that it can happen to."""
        ending = event == "end"
        able = [one for one in self.deployment.replicas if one.ending is ending]
        able = [one for one in able if ending or one.accepts(event)]  # type: ignore[arg-type]
        if not able:
            return
        worker = able[at % len(able)]
        worker.change_state("stop" if ending else event)  # type: ignore[arg-type]
        if ending:
            self.deployment.remove_replica(worker)

    async def finish(self) -> None:
        """Have all come up that are on their way, and all end that are told to."""
        for _ in range(20):
            for event in ("end", "serve"):
                self.happen(event, 0)
                await settle()


@given(st.lists(DEEDS, min_size=4, max_size=25))
@settings(max_examples=200, deadline=None)
def test_some_serve_all_the_time_and_in_the_end_all_is_as_it_was_told(
    deeds: list[tuple[Any, ...]],
) -> None:
    async def play(folder: Path) -> None:
        scene = Scene(folder)
        await settle()
        await scene.do(("serve", 0))
        for deed in deeds:
            await scene.do(deed)
        scene.reload("z", 2, 5)
        await settle()
        await scene.finish()
        deployment = scene.deployment
        assert not deployment.changing
        living = deployment.living
        assert len(living) == (2 if deployment.wanted else 0)
        assert all(one.state == "ready" for one in living)
        assert all(same_worker(one.model, deployment.model) for one in living)
        assert deployment.replicas == living

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))
