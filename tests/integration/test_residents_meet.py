"""Models that come and go, where they meet the rest: GPUs, the breaker, reloads, adapters."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from servekit.supervisor.lifecycle.restart_policy import BreakerLimits
from servekit.supervisor.scheduling.gpu_admission import PATIENCE_S
from servekit.system import cgroup
from tests.integration.instance import Instance, echo, write_config
from tests.integration.made_up_gpus import GIB, MadeUpGpus, on_gpu
from tests.integration.test_adapters import OPEN, folder, load, unload
from tests.integration.test_breaker import Cursed
from tests.integration.test_residents import (
    complete,
    count,
    health,
    on_demand,
    residence,
    run,
    text,
    until_tier,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def gpus(tmp_path: Path) -> MadeUpGpus:
    return MadeUpGpus(tmp_path)


def on_demand_gpu(name: str, memory: str, held: float, **more: Any) -> dict[str, Any]:
    return {**on_gpu(name, memory, held, **more), "load": "on_demand"}


def test_one_that_could_not_be_loaded_takes_no_room(tmp_path: Path, gpus: MadeUpGpus) -> None:
    broken = on_demand_gpu("a", "60%", 0, load_error="no such weights")
    with Instance.up(tmp_path, [broken, on_demand_gpu("b", "60%", 50)], env=gpus.env) as instance:
        instance.until_settled()
        assert complete(instance.url, "a").status_code == 503
        until_tier(instance, "a", "failed")
        assert text(complete(instance.url, "b")) == "hello"


def test_a_load_that_fails_is_not_the_end_of_the_instance(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [on_demand("a", load_error="no such weights")]) as instance:
        instance.until_settled()
        for _ in range(2):
            answer = complete(instance.url, "a")
            assert answer.status_code == 503
            assert "no such weights" in answer.json()["error"]["message"]
        assert health(instance.url)[1]["a"]["residency"] == "failed"


@pytest.mark.lane("residents")
def test_to_load_what_is_loaded_changes_nothing(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [on_demand("a", idle_unload_s=1.0)]) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "a")) == "hello"
        assert run(instance, "load", "a").returncode == 0
        assert "unused" in until_tier(instance, "a", "stopped").reason


@pytest.mark.lane("residents")
def test_workers_of_a_model_that_is_back_are_not_called_as_those_that_drain(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    """Who has claims and turns on a GPU is known by name."""
    models = [on_gpu("a", "30%", 20, step_s=0.05), on_gpu("b", "30%", 20)]
    with Instance.up(tmp_path, models, env=gpus.env) as instance:
        instance.until_settled()
        url = instance.url

        def workers() -> dict[str, str]:
            status = instance.status()
            return {r.name: r.state for m in status.models if m.name == "a" for r in m.replicas}

        with ThreadPoolExecutor(1) as pool:
            # longer than two reloads and a start take on a busy machine
            long = pool.submit(complete, url, "a", tokens=240)
            instance.until("it runs", lambda: instance.replica("a/0").running)
            write_config(tmp_path, models[1:])
            assert run(instance, "reload").returncode == 0
            write_config(tmp_path, models)
            assert run(instance, "reload").returncode == 0
            instance.until("both are there", lambda: workers().get("a/1") == "ready")
            assert workers()["a/0"] == "draining"
            assert text(long.result()) == "hello" * 48
        instance.until("the old one is gone", lambda: workers() == {"a/1": "ready"})


@pytest.mark.lane("residents")
def test_what_an_operator_was_refused_does_not_come_later(tmp_path: Path) -> None:
    models = [
        on_demand("a", load="manual"),
        on_demand("b", load="manual"),
        on_demand("c", memory="10%"),
    ]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        assert run(instance, "load", "a").returncode == 0
        refused = run(instance, "load", "b")
        assert (refused.returncode, "and the others stay" in refused.stderr) == (1, True)
        assert run(instance, "unload", "a").returncode == 0
        assert text(complete(instance.url, "c")) == "hello"  # what is to come is begun by then
        assert residence(instance, "b").tier == "stopped"


@pytest.mark.lane("residents")
def test_one_that_dies_while_it_waits_to_wake_is_loaded_anew(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    model = {**on_demand_gpu("a", "6GiB", 1), "idle_sleep_s": 0.3}
    with Instance.up(tmp_path, [model], env=gpus.env) as instance:
        instance.until_settled()
        url = instance.url
        assert text(complete(url, "a")) == "hello"
        until_tier(instance, "a", "asleep")
        gpus.hold({os.getpid(): 96})
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(complete, url, "a")

            def progress() -> bool:
                told = instance.replica("a/0").progress
                return told is not None and "too few" in told.phase

            instance.until("it waits for memory", progress)
            os.kill(instance.replica("a/0").pid, signal.SIGKILL)
            instance.until("that is the end of it", lambda: "its worker died" in instance.log)
            gpus.hold({})
            assert text(waits.result()) == "hello"
        assert count(instance, "model_loading", "a") == 2


@pytest.mark.lane("residents")
def test_an_operator_is_told_that_the_host_lacks_memory_for_a_sleeper(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    """Its weights are not known, so it would take all that it claims: more than there is."""
    gpus.grow(1 + cgroup.total_memory_bytes() // GIB)
    model = {**on_demand_gpu("a", "100%", 1), "idle_sleep_s": 600.0}
    with Instance.up(tmp_path, [model], env=gpus.env) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "a")) == "hello"
        for words in ((), ("--no-wait",)):
            refused = run(instance, "sleep", "a", *words)
            assert refused.returncode == 1
            said = r"a cannot be asleep: asleep it takes [\d.]+ GiB of the host's memory, where"
            assert re.search(said, refused.stderr), refused.stderr
        assert residence(instance, "a").tier == "resident"
        assert text(complete(instance.url, "a")) == "hello"


@pytest.mark.lane("residents")
def test_to_load_is_a_fresh_try_also_where_the_breaker_is_open(tmp_path: Path) -> None:
    cursed = Cursed(tmp_path)
    model = {**cursed.model, "replicas": 1, "load": "on_demand", "memory": "10%"}
    with Instance.up(tmp_path, [model, echo("b")]) as instance:
        instance.until_settled()

        def opened() -> int:
            return instance.log.count("breaker_opened")

        assert complete(instance.url, "a").status_code == 503
        refused = run(instance, "load", "a")
        assert (refused.returncode, "crash loop: 5 processes" in refused.stderr) == (1, True)
        assert opened() == 2, "it was tried again, and the last of it told"
        assert run(instance, "unload", "a").returncode == 0
        cursed.lift()
        began = time.monotonic()
        assert run(instance, "load", "a").returncode == 0
        assert time.monotonic() - began < BreakerLimits().first_s
        assert text(complete(instance.url, "a")) == "hello"


@pytest.mark.lane("residents")
def test_a_reload_is_a_fresh_try_for_a_model_that_is_stopped(tmp_path: Path) -> None:
    cursed = Cursed(tmp_path)
    model = {**cursed.model, "replicas": 1, "load": "on_demand", "memory": "10%"}
    with Instance.up(tmp_path, [model]) as instance:
        instance.until_settled()
        assert complete(instance.url, "a").status_code == 503
        assert run(instance, "unload", "a").returncode == 0
        cursed.lift()
        write_config(tmp_path, [{**model, "timeout_s": 500.0}])
        assert run(instance, "reload").returncode == 0
        began = time.monotonic()
        assert text(complete(instance.url, "a")) == "hello"
        assert time.monotonic() - began < BreakerLimits().first_s


@pytest.mark.lane("long")
def test_one_that_finds_the_memory_held_by_a_stranger_has_room_made_for_it(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    """By their claims they fit together. What it lacks is told when it comes to the GPU."""
    models = [on_demand_gpu("a", "40%", 40), on_demand_gpu("b", "40%", 40)]
    with Instance.up(tmp_path, models, env=gpus.env) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "a")) == "hello"
        gpus.hold({os.getpid(): 50})
        began = time.monotonic()
        assert text(complete(instance.url, "b")) == "hello"
        assert time.monotonic() - began < PATIENCE_S, "nothing had to fail before"
        assert "evicted for b, which lacks 30.0 GiB" in residence(instance, "a").reason
        assert "process_start_failed" not in instance.log


@pytest.mark.lane("residents")
@pytest.mark.parametrize("claim", ["60%", "40%"])
def test_a_model_for_good_that_a_reload_adds_has_room_made_for_it(
    tmp_path: Path, gpus: MadeUpGpus, claim: str
) -> None:
    """Where there is none beside those that come and go: only then do they have to."""
    models = [on_demand_gpu("a", "30%", 30), on_demand_gpu("b", "30%", 30)]
    with Instance.up(tmp_path, models, env=gpus.env) as instance:
        instance.until_settled()
        for name in "ab":
            assert text(complete(instance.url, name)) == "hello"
        write_config(tmp_path, [*models, on_gpu("c", claim, 40)])
        assert run(instance, "reload").returncode == 0

        def states() -> list[str]:
            return [replica.state for replica in instance.model("c").replicas]

        instance.until("c is there", lambda: states() == ["ready"], 60)
        assert complete(instance.url, "c").status_code == 200
        tiers = sorted(residence(instance, name).tier for name in "ab")
        assert tiers == (["resident", "stopped"] if claim == "60%" else ["resident", "resident"])
        assert "process_start_failed" not in instance.log


@pytest.mark.lane("residents")
def test_adapters_are_added_to_models_that_are_away(tmp_path: Path) -> None:
    model = on_demand("a", idle_sleep_s=600.0)
    with Instance.up(tmp_path, [model, echo("b")], server=OPEN) as instance:
        instance.until_settled()
        url = instance.url
        added = run(instance, "adapter", "add", "loud", folder(tmp_path, "loud"), "-m", "a")
        assert added.stdout == "loud is loaded with a, which is not there now\n", added.stderr
        assert residence(instance, "a").tier == "stopped", "that is no reason to load it"
        assert text(complete(url, "loud")) == "HELLO"
        assert text(complete(url, "a")) == "hello"
        assert run(instance, "sleep", "a").returncode == 0
        lout = load(url, "lout", folder(tmp_path, "lout"), base_model_name="a")
        assert lout.status_code == 200, lout.text
        assert unload(url, "loud").status_code == 200
        assert residence(instance, "a").tier == "asleep"
        assert text(complete(url, "lout")) == "HELLO"
        assert complete(url, "loud").status_code == 404
        assert run(instance, "unload", "a").returncode == 0
        wrong = folder(tmp_path, "wrong")
        (tmp_path / "wrong" / "adapter_config.json").write_text("no JSON")
        assert load(url, "wrong", wrong, base_model_name="a").status_code == 200
        assert text(complete(url, "a")) == "hello"  # whatever becomes of its adapters
        refused = complete(url, "wrong")
        assert (refused.status_code, "not valid JSON" in refused.text) == (503, True)
        assert text(complete(url, "lout")) == "HELLO"
        assert count(instance, "model_loading", "a") == 2


@pytest.mark.lane("residents")
def test_a_standby_ends_with_its_model_and_comes_again(tmp_path: Path) -> None:
    model = {**on_demand("a", idle_sleep_s=600.0), "standby": True}
    with Instance.up(tmp_path, [model]) as instance:
        instance.until_settled()

        def states() -> list[str]:
            return [standby.state for standby in instance.model("a").standbys]

        for _ in range(2):
            assert text(complete(instance.url, "a")) == "hello"
            instance.until("there is a standby", lambda: states() == ["ready"], 60)
            assert run(instance, "sleep", "a").returncode == 0
            assert states() == ["ready"], "its workers are there"
            assert run(instance, "unload", "a").returncode == 0
            instance.until("it is gone, too", lambda: not states())


@pytest.mark.lane("long")
def test_one_that_makes_room_comes_back_from_its_standby(tmp_path: Path, gpus: MadeUpGpus) -> None:
    models = [{**on_demand_gpu(name, "60%", 0), "standby": True} for name in "ab"]
    with Instance.up(tmp_path, models, env=gpus.env) as instance:
        instance.until_settled()

        def states(name: str) -> list[str]:
            return [standby.state for standby in instance.model(name).standbys]

        def serves_with_a_standby(name: str) -> None:
            assert text(complete(instance.url, name)) == "hello"
            instance.until("there is a standby", lambda: states(name) == ["ready"], 60)

        for name in "abab":
            serves_with_a_standby(name)
        assert states("a") == states("b") == ["ready"]
        assert residence(instance, "a").tier == "stopped"
        assert run(instance, "unload", "b").returncode == 0
        instance.until("it is gone with its model", lambda: not states("b"))


@pytest.mark.lane("residents")
@pytest.mark.parametrize("tier", ["asleep", "stopped"])
def test_at_the_end_nobody_waits_for_one_that_finds_no_memory(
    tmp_path: Path, gpus: MadeUpGpus, tier: str
) -> None:
    """Nobody goes for it any more. What loads is waited for, and what it was loaded for is done."""
    models = [
        {**on_demand_gpu("a", "6GiB", 1), "idle_sleep_s": 0.3},
        on_demand("b", load_s=1.5, memory="10%"),
    ]
    with Instance.up(tmp_path, models, server={"drain_timeout_s": 60.0}, env=gpus.env) as instance:
        instance.until_settled()
        url = instance.url
        if tier == "asleep":
            assert text(complete(url, "a")) == "hello"
        until_tier(instance, "a", tier)
        gpus.hold({os.getpid(): 96})
        with ThreadPoolExecutor(2) as pool:
            waits = pool.submit(complete, url, "a")

            def lacks_memory() -> bool:
                told = [replica.progress for replica in instance.model("a").replicas]
                return any(one is not None and "too few" in one.phase for one in told)

            instance.until("it waits for memory", lacks_memory)
            loads = pool.submit(complete, url, "b")
            until_tier(instance, "b", "coming")
            instance.signal(signal.SIGTERM)
            refused = waits.result()
            assert (refused.status_code, "shutting down" in refused.text) == (503, True)
            assert text(loads.result()) == "hello"
            assert instance.wait(10) == 0


@pytest.mark.lane("residents")
def test_a_version_that_is_taken_back_is_counted_where_the_old_one_is(tmp_path: Path) -> None:
    gpus = MadeUpGpus(tmp_path, 2)
    a, b = on_demand_gpu("a", "60%", 50), on_demand_gpu("b", "60%", 50)
    with Instance.up(tmp_path, [{**a, "gpus": [0]}, {**b, "gpus": [0]}], env=gpus.env) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "a")) == "hello"
        broken = {**a, "gpus": [1], "options": {"load_error": "no such weights"}}
        write_config(tmp_path, [broken, {**b, "gpus": [0]}])
        assert run(instance, "reload").returncode == 0
        instance.until("it is taken back", lambda: "model_reload_failed" in instance.log)
        began = time.monotonic()
        assert text(complete(instance.url, "b")) == "hello"
        assert time.monotonic() - began < PATIENCE_S
        assert "evicted for b" in residence(instance, "a").reason


@pytest.mark.lane("residents")
@pytest.mark.parametrize(
    ("load", "why"),
    [
        ("on_start", "a worker has come up beside those that sleep"),
        ("on_demand", "a reload or a restart came while it was asleep"),
    ],
)
def test_a_sleeper_that_is_joined_by_another_worker_is_stopped_and_says_so(
    tmp_path: Path, load: str, why: str
) -> None:
    model = {**on_demand("a", idle_sleep_s=0.3, memory="20%"), "load": load}
    with Instance.up(tmp_path, [model]) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "a")) == "hello"
        until_tier(instance, "a", "asleep")
        write_config(tmp_path, [{**model, "replicas": 2}])
        assert run(instance, "reload").returncode == 0
        reason = until_tier(instance, "a", "stopped").reason
        assert reason.endswith(why)
        assert text(complete(instance.url, "a")) == "hello"
