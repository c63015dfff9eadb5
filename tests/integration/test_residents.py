"""Models that come and go, with real processes: who waits is served, and nobody is cut off."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.protocol.residency import ResidencyStatus
from tests.integration.instance import PROGRAM, Instance, echo, write_config

#: Two of these do not fit together.
MOST = "60%"
PATIENCE_S = 60.0


def on_demand(name: str, *, load_s: float = 0.3, **more: Any) -> dict[str, Any]:
    keys = {"load", "memory", "idle_sleep_s", "idle_unload_s", "timeout_s", "reasoning_parser"}
    own = {key: more.pop(key) for key in list(more) if key in keys}
    return {**echo(name, load_s=load_s, **more), "load": "on_demand", "memory": MOST, **own}


def complete(url: str, model: str, prompt: str = "hello", tokens: int = 5) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


def at_once(*works: Callable[[], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def asker(url: str, model: str, **more: Any) -> Callable[[], httpx.Response]:
    return lambda: complete(url, model, **more)


def residence(instance: Instance, model: str) -> ResidencyStatus:
    found = instance.model(model).residence
    assert found is not None
    return found


def until_tier(
    instance: Instance, model: str, tier: str, within_s: float = 60.0
) -> ResidencyStatus:
    def probe() -> ResidencyStatus | None:
        found = residence(instance, model)
        return found if found.tier == tier else None

    found = instance.until(f"{model} is {tier}", probe, within_s)
    assert found is not None
    return found


def count(instance: Instance, event: str, model: str) -> int:
    return len(re.findall(rf"\] {event} .*model={model}\b", instance.log))


def run(instance: Instance, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *words, "--run-dir", str(instance.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def health(url: str) -> tuple[int, Any]:
    answer = httpx.get(f"{url}/readyz")
    return answer.status_code, answer.json()["models"]


# ---------------------------------------------------------------- by need


@pytest.mark.lane("long")
def test_alternating_requests_are_served_in_groups_each_by_one_load(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [on_demand("a"), on_demand("b")]) as instance:
        instance.until_settled()
        url = instance.url
        assert health(url)[0] == 200  # each can be loaded
        answers = at_once(*(asker(url, name) for name in "ababab"))
        assert [text(answer) for answer in answers] == ["hello"] * 6
        assert count(instance, "model_loading", "a") + count(instance, "model_loading", "b") == 2
        stopped = "a" if residence(instance, "a").tier == "stopped" else "b"
        other = "b" if stopped == "a" else "a"
        reason = residence(instance, stopped).reason
        assert re.fullmatch(
            rf"stopped at [\d:]+: evicted for {other}, [\d.]+ GiB needed, [\d.]+ GiB free", reason
        )
        assert reason in run(instance, "why", stopped).stdout
        assert reason in run(instance, "ps").stdout
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert {one["id"]: one["state"] for one in listed} == {stopped: "stopped", other: "ready"}
        # asked one after the other, each in turn has to make room
        assert [text(complete(url, name)) for name in (stopped, other)] == ["hello"] * 2
        assert count(instance, "model_loading", "a") + count(instance, "model_loading", "b") == 4


def test_models_that_can_sleep_are_woken_rather_than_loaded(tmp_path: Path) -> None:
    models = [on_demand(name, load_s=1.0, idle_sleep_s=600.0) for name in "ab"]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        for name in "ababab":
            assert text(complete(instance.url, name)) == "hello"
        assert [count(instance, "model_loading", name) for name in "ab"] == [1, 1]
        assert until_tier(instance, "a", "asleep").reason.startswith("asleep since ")
        assert instance.replica("a/0").state == "asleep"
        assert health(instance.url)[0] == 200
        pid = instance.replica("a/0").pid
        said = "a was asleep and is stopped; the next request loads it"
        assert said in run(instance, "restart", "a").stdout  # b has the memory
        until_tier(instance, "a", "stopped")
        assert residence(instance, "b").tier == "resident"
        assert text(complete(instance.url, "a")) == "hello"
        assert [one.pid for one in instance.model("a").replicas] != [pid]


@pytest.mark.lane("long")
def test_a_flood_for_one_model_joins_one_load(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [on_demand("a", load_s=1.0)]) as instance:
        instance.until_settled()
        answers = at_once(*[asker(instance.url, "a")] * 20)
        assert {text(answer) for answer in answers} == {"hello"}
        assert count(instance, "model_loading", "a") == 1


@pytest.mark.lane("residents")
def test_what_runs_is_finished_before_a_model_goes_and_what_comes_waits(tmp_path: Path) -> None:
    models = [on_demand("a", step_s=0.05), on_demand("b")]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        url = instance.url
        assert text(complete(url, "b")) == "hello"  # from now on it is known what it costs
        with ThreadPoolExecutor(3) as pool:
            long = pool.submit(complete, url, "a", tokens=300)  # 15 s
            until_tier(instance, "a", "resident")
            other = pool.submit(complete, url, "b")
            assert residence(instance, "a").tier == "resident"  # it has its turn
            until_tier(instance, "a", "leaving")
            late = pool.submit(complete, url, "a")
            assert not long.done()
            assert text(long.result()) == "hello" * 60
            assert text(other.result()) == "hello"
            assert text(late.result()) == "hello"
        assert [count(instance, "model_loading", name) for name in "ab"] == [2, 2]
        assert instance.model("a").replicas[0].restarts == 0


def test_one_that_fits_beside_others_is_loaded_at_once(tmp_path: Path) -> None:
    models = [on_demand("a", memory="30%"), on_demand("b", memory="30%")]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        for name in "abab":
            assert text(complete(instance.url, name)) == "hello"
        assert {residence(instance, name).tier for name in "ab"} == {"resident"}


def test_what_a_model_can_do_is_known_before_its_first_answer_is_read(tmp_path: Path) -> None:
    model = on_demand("a", reasoning_parser="think")
    with Instance.up(tmp_path, [model]) as instance:
        instance.until_settled()
        said = "<think>so</think>then"
        asked = [{"role": "user", "content": said}]
        body = {"model": "a", "messages": asked, "max_tokens": len(said)}
        answer = httpx.post(f"{instance.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "then")


# ---------------------------------------------------------------- when it goes wrong


@pytest.mark.lane("residents")
def test_those_who_wait_for_a_load_that_fails_are_told_why(tmp_path: Path) -> None:
    models = [on_demand("a", load_error="no such weights"), echo("b")]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        for answer in at_once(*[asker(instance.url, "a")] * 3):
            assert answer.status_code == 503
            assert "no such weights" in answer.json()["error"]["message"]
        assert text(complete(instance.url, "b")) == "hello"
        status, models_ = health(instance.url)
        assert (status, models_["a"]["residency"]) == (503, "failed")
        loaded = run(instance, "load", "a")
        assert loaded.returncode == 1
        assert "no such weights" in loaded.stderr


@pytest.mark.lane("residents")
def test_who_goes_away_is_not_loaded_for(tmp_path: Path) -> None:
    models = [on_demand("a", step_s=0.05), on_demand("b")]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        url = instance.url
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(complete, url, "a", tokens=100)
            until_tier(instance, "a", "resident")
            body = {"model": "b", "prompt": "x"}
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{url}/v1/completions", json=body, timeout=0.5)
            instance.until("nobody waits", lambda: not residence(instance, "b").waiting)
            assert text(long.result()) == "hello" * 20
        assert residence(instance, "a").tier == "resident"
        assert count(instance, "model_loading", "b") == 0


@pytest.mark.lane("long")
def test_a_worker_killed_in_its_sleep_is_stopped_and_comes_again(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [on_demand("a", idle_sleep_s=0.3)]) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "a")) == "hello"
        until_tier(instance, "a", "asleep")
        os.kill(instance.replica("a/0").pid, signal.SIGKILL)
        assert "did not stay asleep" in until_tier(instance, "a", "stopped").reason
        assert text(complete(instance.url, "a")) == "hello"


@pytest.mark.lane("residents")
def test_one_that_cannot_be_put_to_sleep_is_stopped(tmp_path: Path) -> None:
    models = [
        on_demand("a", idle_sleep_s=600.0, sleep_error="it is not tired"),
        on_demand("b", idle_sleep_s=600.0, wake_error="it sleeps too well"),
    ]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        for name in "abab":
            assert text(complete(instance.url, name)) == "hello"
        assert residence(instance, "a").tier == "stopped"
        assert "it is not tired" in instance.log
        assert "it sleeps too well" in instance.log
        assert [count(instance, "model_loading", name) for name in "ab"] == [2, 2]


@pytest.mark.lane("long")
def test_at_the_end_nobody_is_kept_waiting_for_a_load(tmp_path: Path) -> None:
    models = [on_demand("a", step_s=0.05), on_demand("b")]
    with Instance.up(tmp_path, models, server={"drain_timeout_s": 20.0}) as instance:
        instance.until_settled()
        url = instance.url
        with ThreadPoolExecutor(2) as pool:
            long = pool.submit(complete, url, "a", tokens=60)
            until_tier(instance, "a", "resident")
            other = pool.submit(complete, url, "b")
            instance.until("b is waited for", lambda: residence(instance, "b").waiting == 1)
            instance.signal(signal.SIGTERM)
            refused = other.result()
            assert (refused.status_code, long.done()) == (503, False)
            assert "shutting down" in refused.json()["error"]["message"]
            assert text(long.result()) == "hello" * 12
        assert instance.wait() == 0


@pytest.mark.lane("long")
def test_an_end_while_it_loads_leaves_nothing(tmp_path: Path) -> None:
    models, server = [on_demand("a", load_s=30.0)], {"drain_timeout_s": 0.5}
    with Instance.up(tmp_path, models, server=server) as instance:
        instance.until_settled()
        asking = threading.Thread(target=_ask_in_vain, args=(instance.url,), daemon=True)
        asking.start()
        until_tier(instance, "a", "coming")
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0
        asking.join(PATIENCE_S)


def _ask_in_vain(url: str) -> None:
    with contextlib.suppress(httpx.TransportError):
        assert complete(url, "a").status_code == 503


# ---------------------------------------------------------------- time


@pytest.mark.lane("residents")
def test_unused_it_sleeps_and_then_goes(tmp_path: Path) -> None:
    models = [on_demand("a", idle_sleep_s=0.5, idle_unload_s=2.0)]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "a")) == "hello"
        assert "unused" in until_tier(instance, "a", "asleep").reason
        assert text(complete(instance.url, "a")) == "hello"
        assert "unused" in until_tier(instance, "a", "stopped").reason
        assert text(complete(instance.url, "a")) == "hello"


def generate(url: str, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "stream": False, "options": {"num_predict": 5}}
    body |= more
    return httpx.post(f"{url}/api/generate", json=body, timeout=PATIENCE_S)


@pytest.mark.lane("long")
def test_clients_of_ollama_say_how_long_a_model_stays(tmp_path: Path) -> None:
    models = [on_demand("a", idle_unload_s=600.0), echo("b")]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        url = instance.url
        assert generate(url, "a", keep_alive="1s").json()["response"] == "hello"
        until_tier(instance, "a", "stopped")
        assert generate(url, "a", keep_alive=-1).json()["response"] == "hello"
        instance.until("it stays", lambda: residence(instance, "a").leaves_in_s is None)
        entry = next(one for one in _running(url) if one["name"] == "a:latest")
        assert entry["expires_at"].startswith("9999")
        assert generate(url, "a", keep_alive="10m").json()["response"] == "hello"
        instance.until("it goes", lambda: 500 < (residence(instance, "a").leaves_in_s or 0) < 601)
        done = generate(url, "a", prompt="", keep_alive=0)
        assert done.json()["done_reason"] == "unload"
        assert "client" in until_tier(instance, "a", "stopped").reason
        assert [one["name"] for one in _running(url)] == ["b:latest"]
        assert generate(url, "a", prompt="").json()["done_reason"] == "load"
        until_tier(instance, "a", "resident")
        refused = generate(url, "a", keep_alive="soon")
        assert (refused.status_code, "keep_alive" in refused.json()["error"]) == (400, True)
        # a model that the file has loaded at the start is not a client's to unload
        assert generate(url, "b", keep_alive=0).json()["response"] == "hello"
        assert instance.model("b").residence is None


def _running(url: str) -> Sequence[Any]:
    models: list[Any] = httpx.get(f"{url}/api/ps").json()["models"]
    return models


# ---------------------------------------------------------------- operators


@pytest.mark.lane("residents")
def test_operators_load_and_unload_wake_and_put_to_sleep(tmp_path: Path) -> None:
    models = [on_demand("a", load="manual"), echo("b"), on_demand("big", memory="90%")]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        refused = complete(instance.url, "a")
        assert refused.status_code == 503
        assert "servekit load a" in refused.json()["error"]["message"]
        assert health(instance.url)[0] == 200  # nobody expects it to be there
        assert "a is loaded after" in run(instance, "load", "a").stdout
        assert run(instance, "load", "a").stdout == "a is already loaded\n"
        assert text(complete(instance.url, "a")) == "hello"
        too_big = run(instance, "load", "big")
        assert (too_big.returncode, "and the others stay" in too_big.stderr) == (1, True)
        assert "a is asleep after" in run(instance, "sleep", "a").stdout
        assert text(complete(instance.url, "a")) == "hello"  # which wakes it
        assert run(instance, "sleep", "a").returncode == 0
        assert "a is awake after" in run(instance, "wake", "a").stdout
        assert "a is stopped after" in run(instance, "unload", "a").stdout
        assert run(instance, "wake", "a").returncode == 1
        # also a model that is there from the start, and then not by a request
        assert run(instance, "unload", "b").returncode == 0
        assert complete(instance.url, "b").status_code == 503
        begun = run(instance, "load", "b", "--no-wait")
        assert (begun.returncode, "b is " in begun.stdout) == (0, True)
        until_tier(instance, "b", "resident")
        assert text(complete(instance.url, "b")) == "hello"
        assert run(instance, "load", "nobody").returncode == 2


@pytest.mark.lane("long")
def test_a_reload_changes_when_models_come_and_go(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [on_demand("a"), on_demand("b", memory="30%")]) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "b")) == "hello"
        models = [
            on_demand("a", load="on_start", memory="30%"),
            on_demand("b", memory="30%", idle_unload_s=0.5),
        ]
        write_config(tmp_path, models)
        assert run(instance, "reload").returncode == 0
        instance.until("a is loaded", lambda: instance.replica("a/0").state == "ready")
        assert "unused" in until_tier(instance, "b", "stopped").reason  # not replaced
        assert count(instance, "model_loading", "b") == 1
        write_config(tmp_path, [on_demand("b", load="manual")])
        assert run(instance, "reload").returncode == 0
        assert complete(instance.url, "b").status_code == 503
        assert complete(instance.url, "a").status_code == 404
