"""The experiments of `servekit chaos` on a real instance: what it promises, it keeps."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from servekit.chaos import run
from servekit.chaos.result import ExperimentContext, ExperimentResult
from servekit.chaos.target import Target
from servekit.errors import StartError
from servekit.system.parent_death import CHAOS
from tests.integration.instance import PROGRAM, Instance, echo

#: What fits between two of its own deaths.
SECONDS = 1.0


def model() -> dict[str, object]:
    options = {"step_s": 0.01, "slots": 16, "hang_on": "(hang)", "grandchildren": 1}
    settings = echo("a", replicas=3, **options)
    return {**settings, "max_queue": 24, "stall_timeout_s": 1.0}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("chaos")
    server, env = {"gateways": 2}, {CHAOS: "1"}
    with Instance.up(folder, [model()], server=server, env=env) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture(scope="module")
def scene(instance: Instance) -> ExperimentContext:
    url = instance.url

    async def make() -> ExperimentContext:
        target = await Target.find_target(url, instance.run_dir, None)
        known = await run.known_answers(target, count=4)
        assert all(one.sure for one in known)
        return ExperimentContext(target, known, SECONDS, memory_bytes=64 * 2**20)

    return asyncio.run(make())


def carry_out(name: str, scene: ExperimentContext) -> ExperimentResult:
    async def one() -> ExperimentResult:
        assert await scene.target.until_whole(30.0) is not None
        return await run.EXPERIMENTS[name](scene)

    return asyncio.run(one())


#: Those that this instance is not for: what has none, and what is its end.
ELSEWHERE = ("engine-process-killed", run.LAST)


lane = pytest.mark.lane("chaos")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "worker-killed" else lane)
        for name in run.EXPERIMENTS
        if name not in ELSEWHERE
    ],
)
def test_the_promise_is_kept(name: str, scene: ExperimentContext, instance: Instance) -> None:
    for _ in range(3):
        finding = carry_out(name, scene)
        assert (finding.failed, finding.wrong) == (0, 0), finding
        if finding.verdict == "kept":
            assert finding.answered > 0
            return
        if "promised within" not in finding.detail.partition(";")[0]:
            break  # it was not a time, which a machine that is busy with others does not keep
    pytest.fail(f"{finding}\n{instance.log}")


@lane
def test_no_step_is_made_to_raise_in_who_was_not_started_for_it(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("one", step_s=0.01)]) as instance:
        url, pid = instance.until_settled().url, instance.replica("one/0").pid

        async def find() -> list[ExperimentResult]:
            target = await Target.find_target(url, instance.run_dir, "one")
            known = await run.known_answers(target, count=2)
            scene = ExperimentContext(target, known, SECONDS)
            return [await run.EXPERIMENTS[n](scene) for n in ("step-raises", ELSEWHERE[0])]

        found = asyncio.run(find())
        assert [finding.verdict for finding in found] == ["skipped"] * 2
        assert "start it with `SERVEKIT_CHAOS=1 servekit up" in found[0].detail
        assert instance.replica("one/0").pid == pid


@lane
def test_a_single_worker_is_waited_for(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("one", step_s=0.01)]) as instance:
        url = instance.until_settled().url

        async def kill() -> ExperimentResult:
            target = await Target.find_target(url, instance.run_dir, "one")
            known = await run.known_answers(target, count=2)
            return await run.EXPERIMENTS["worker-killed"](ExperimentContext(target, known, SECONDS))

        finding = asyncio.run(kill())
    assert finding.verdict == "kept", finding
    assert finding.whole_s is not None and finding.whole_s < 10.0


def test_a_text_that_differs_breaks_the_promise(scene: ExperimentContext) -> None:
    first = scene.known[0]
    other = replace(first.answer, text="x" + first.answer.text[1:])
    finding = carry_out("worker-killed", replace(scene, known=[replace(first, answer=other)]))
    assert finding.verdict == "broken"
    assert finding.wrong == finding.answered > 0


@lane
def test_nothing_survives_the_supervisor_and_the_next_start_cleans(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [model()]) as instance:
        url = instance.until_settled().url

        async def kill() -> ExperimentResult:
            target = await Target.find_target(url, instance.run_dir, "a")
            known = await run.known_answers(target, count=2)
            return await run.EXPERIMENTS[run.LAST](ExperimentContext(target, known, SECONDS))

        finding = asyncio.run(kill())
        assert finding.verdict == "kept", finding
        assert instance.survivors() == []
        left = {path.name for path in instance.run_dir.glob("*.sock")}
        assert left
    with Instance.up(tmp_path, [model()]) as instance:
        instance.until_settled()
        sockets = {replica.socket for m in instance.status().models for replica in m.replicas}
        now = {str(path) for path in instance.run_dir.glob("w*.sock")}
        assert now == sockets


# ---------------------------------------------------------------- the command


def chaos(instance: Instance, *args: str) -> subprocess.CompletedProcess[str]:
    where = ("--url", instance.url, "--run-dir", str(instance.run_dir))
    return subprocess.run(
        [*PROGRAM, "chaos", *where, *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_tells_what_it_found(instance: Instance, scene: ExperimentContext) -> None:
    told = chaos(instance, "--yes", "--seconds", "0.5", "--only", "vanishing,memory", "--json")
    assert told.returncode == 0, told.stderr
    found = [(row["experiment"], row["verdict"]) for row in json.loads(told.stdout)]
    assert found == [("vanishing", "kept"), ("memory pressure", "skipped")]


def test_the_command_asks_first(instance: Instance) -> None:
    before = instance.status()
    told = chaos(instance)
    assert told.returncode == 1
    assert "Kill and stop processes" in told.stdout
    after = instance.status()
    assert [r.pid for r in after.models[0].replicas] == [r.pid for r in before.models[0].replicas]


@pytest.mark.lane("long")
def test_the_command_wants_a_name_that_there_is(instance: Instance) -> None:
    told = chaos(instance, "--yes", "--only", "nonsense")
    assert told.returncode == 2
    assert "worker-killed" in told.stderr
    assert chaos(instance, "--yes", "--model", "nonsense").returncode == 2


def test_another_instances_url_is_refused(instance: Instance) -> None:
    with pytest.raises(StartError, match=r"not http://127\.0\.0\.1:9"):
        asyncio.run(Target.find_target("http://127.0.0.1:9", instance.run_dir, None))


@pytest.mark.lane("long")
def test_a_run_directory_where_nothing_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no servekit runs"):
        asyncio.run(Target.find_target("http://127.0.0.1:8000", tmp_path, None))
