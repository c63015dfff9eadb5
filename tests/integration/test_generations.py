"""A model of a name becomes another one while answers are under way: no text is of both."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.protocol.messages import ReplicaStatus
from tests.integration.instance import Instance, echo, write_config
from tests.integration.test_faults_supervisor import cli

pytestmark = pytest.mark.timeout(180)

TEXT = "abcdefghij"
LENGTH = 240  # 4.8 s at 0.02 s a token
DRAIN_S = 0.8


def model(path: str, **options: Any) -> dict[str, Any]:
    return echo("m", step_s=0.02, **options) | {"path": path}


def lap(tokens: int) -> str:
    return (TEXT * (tokens // len(TEXT) + 1))[:tokens]


class Asked:
    """A request under way: what has come, and how it ended."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, path: str, **body: Any) -> None:
        self.text = ""
        self.error: dict[str, Any] = {}
        self.begun = threading.Event()
        self.lines: list[str] = []
        self._events = 0
        self._body = body
        self.over: Future[Asked] = pool.submit(self._ask, f"{url}{path}")

    def _ask(self, url: str) -> Asked:
        with httpx.stream("POST", url, json=self._body, timeout=90) as answer:
            if not self._body.get("stream"):
                self._take(json.loads(answer.read()))
                return self
            for line in answer.iter_lines():
                self.lines.append(line)
                if (found := line.removeprefix("data: ")).startswith("{"):
                    self._take(json.loads(found))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error") or self.error
        for choice in event.get("choices") or ():
            self.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        self._events += 1
        if self._events > 8:  # some APIs begin with events that say nothing yet
            self.begun.set()


def completion(pool: ThreadPoolExecutor, url: str, tokens: int, *, stream: bool) -> Asked:
    body = {"model": "m", "prompt": TEXT, "max_tokens": tokens, "stream": stream}
    return Asked(pool, url, "/v1/completions", **body)


def reload(instance: Instance, tmp_path: Path, *models: dict[str, Any], **server: Any) -> None:
    write_config(tmp_path, models, {"drain_timeout_s": DRAIN_S, **server})
    asked = cli(instance, "reload")
    assert asked.returncode == 0, asked.stderr


def workers(instance: Instance, state: str) -> list[ReplicaStatus]:
    return [one for one in instance.model("m").replicas if one.state == state]


@pytest.mark.parametrize("gateways", [pytest.param(1, marks=pytest.mark.lane("long")), 2])
def test_what_is_under_way_is_finished_by_the_model_that_began_it(
    tmp_path: Path, gateways: int
) -> None:
    server = {"drain_timeout_s": DRAIN_S, "gateways": gateways}
    with (
        ThreadPoolExecutor(8) as pool,
        Instance.up(tmp_path, [model("old")], server=server) as instance,
    ):
        url = instance.until_settled().url
        asked = [completion(pool, url, LENGTH, stream=n % 2 == 0) for n in range(8)]
        assert all(one.begun.wait(20) for one in asked[::2])
        [old] = workers(instance, "ready")
        reload(instance, tmp_path, model("new"), gateways=gateways)
        began = time.monotonic()
        instance.until("the new one serves", lambda: workers(instance, "draining"))
        [new] = instance.until("the new one serves", lambda: workers(instance, "ready"))
        assert new.generation.partition(".")[0] != old.generation.partition(".")[0]
        assert completion(pool, url, 5, stream=True).over.result(20).text == TEXT[:5]
        for one in asked:
            assert (one.over.result(60).text, one.error) == (lap(LENGTH), {})
        assert time.monotonic() - began > 2 * DRAIN_S, "or nothing was shown"
        instance.until("the old one is gone", lambda: len(instance.model("m").replicas) == 1)
        assert instance.replica(new.name).restarts == 0
        assert "did not" not in instance.log, "it was killed"


@pytest.mark.lane("long")
@pytest.mark.parametrize("gateways", [1, 2])
def test_where_none_of_its_generation_is_left_a_stream_says_so_and_the_rest_begins_anew(
    tmp_path: Path, gateways: int
) -> None:
    server = {"drain_timeout_s": DRAIN_S, "gateways": gateways}
    with (
        ThreadPoolExecutor(12) as pool,
        Instance.up(tmp_path, [model("old")], server=server) as instance,
    ):
        url = instance.until_settled().url
        chat = {"model": "m", "max_tokens": LENGTH, "stream": True}
        chat["messages"] = [{"role": "user", "content": TEXT}]
        streams = [completion(pool, url, LENGTH, stream=True) for _ in range(4)]
        streams.append(Asked(pool, url, "/v1/chat/completions", **chat))
        anthropic = Asked(pool, url, "/v1/messages", **chat)
        ollama = Asked(pool, url, "/api/chat", **chat | {"options": {"num_predict": LENGTH}})
        responses = Asked(
            *(pool, url, "/v1/responses"), model="m", input=TEXT, stream=True,
            max_output_tokens=LENGTH,
        )  # fmt: skip
        whole = [completion(pool, url, 100, stream=False) for _ in range(4)]
        said = [*streams, anthropic, ollama, responses]
        assert all(one.begun.wait(20) for one in said)
        reload(instance, tmp_path, model("new"), gateways=gateways)
        [old] = instance.until("the old one drains", lambda: workers(instance, "draining"))
        os.kill(old.pid, signal.SIGKILL)
        for one in streams:
            assert one.over.result(20).error["code"] == "model_changed", one.lines[-3:]
            assert "another model" in one.error["message"]
        assert all(lap(LENGTH).startswith(one.text) for one in streams)
        assert "another model" in anthropic.over.result(20).error["message"]
        assert "another model" in str(ollama.over.result(20).error)
        assert "another model" in "".join(responses.over.result(20).lines[-4:])
        for one in whole:
            assert (one.over.result(20).text, one.error) == (lap(100), {})


@pytest.mark.lane("long")
def test_one_of_the_same_generation_that_drains_goes_on_with_it(tmp_path: Path) -> None:
    """Two old workers drain beside two new ones; one is killed, the other has yet to do."""
    server = {"drain_timeout_s": DRAIN_S}
    with (
        ThreadPoolExecutor(8) as pool,
        Instance.up(
            tmp_path, [model("old", slots=16) | {"replicas": 2}], server=server
        ) as instance,
    ):
        url = instance.until_settled().url
        asked = [completion(pool, url, LENGTH, stream=True) for n in range(8)]
        assert all(one.begun.wait(20) for one in asked)
        reload(instance, tmp_path, model("new", slots=16) | {"replicas": 2})
        instance.until("both drain", lambda: len(workers(instance, "draining")) == 2)
        os.kill(workers(instance, "draining")[0].pid, signal.SIGKILL)
        for one in asked:
            assert (one.over.result(60).text, one.error) == (lap(LENGTH), {})


@pytest.mark.lane("long")
def test_a_change_that_leaves_the_text_alone_is_gone_on_with(tmp_path: Path) -> None:
    """More slots, say: what the old worker has begun the new one may go on with."""
    with (
        ThreadPoolExecutor(4) as pool,
        Instance.up(tmp_path, [model("same")], server={"drain_timeout_s": DRAIN_S}) as instance,
    ):
        url = instance.until_settled().url
        asked = [completion(pool, url, LENGTH, stream=n % 2 == 0) for n in range(4)]
        assert all(one.begun.wait(20) for one in asked[::2])
        reload(instance, tmp_path, model("same", slots=7))
        [old] = instance.until("the old one drains", lambda: workers(instance, "draining"))
        os.kill(old.pid, signal.SIGKILL)
        for one in asked:
            assert (one.over.result(60).text, one.error) == (lap(LENGTH), {})


def test_a_killed_worker_that_comes_again_is_of_the_same_generation(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool, Instance.up(tmp_path, [model("same")]) as instance:
        url = instance.until_settled().url
        asked = [completion(pool, url, LENGTH, stream=n % 2 == 0) for n in range(4)]
        assert all(one.begun.wait(20) for one in asked[::2])
        before = instance.replica("m/0")
        os.kill(before.pid, signal.SIGKILL)
        for one in asked:
            assert (one.over.result(60).text, one.error) == (lap(LENGTH), {})
        assert instance.replica("m/0").generation == before.generation


def adapted(folder: Path, transform: str) -> dict[str, Any]:
    path = folder / transform
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"transform": transform}))
    one = {"name": "loud", "path": str(path)}
    return model("same") | {"adapters": [one]}


@pytest.mark.lane("long")
def test_an_adapter_of_the_same_name_and_other_weights_goes_on_with_nothing(
    tmp_path: Path,
) -> None:
    with (
        ThreadPoolExecutor(4) as pool,
        Instance.up(tmp_path, [adapted(tmp_path, "upper")]) as instance,
    ):
        url = instance.until_settled().url
        body = {"model": "loud", "prompt": TEXT, "max_tokens": 5 * LENGTH}
        streamed = Asked(pool, url, "/v1/completions", **body, stream=True)
        plain = completion(pool, url, LENGTH, stream=True)
        assert streamed.begun.wait(20) and plain.begun.wait(20)
        changed = adapted(tmp_path, "lower")
        reload(instance, tmp_path, changed | {"options": changed["options"] | {"slots": 9}})
        [old] = instance.until("the old one drains", lambda: workers(instance, "draining"))
        os.kill(old.pid, signal.SIGKILL)
        assert streamed.over.result(30).error["code"] == "model_changed"
        assert lap(5 * LENGTH).upper().startswith(streamed.text)
        assert (plain.over.result(60).text, plain.error) == (lap(LENGTH), {})


def test_a_gateway_that_starts_meanwhile_has_requests_wait_for_the_new_version(
    tmp_path: Path,
) -> None:
    """Nobody who is left has seen the old version serve."""
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, [model("old", load_s=3.0)]) as instance,
    ):
        url = instance.until_settled().url
        [old] = workers(instance, "ready")
        os.kill(old.pid, signal.SIGKILL)
        instance.until("the old one loads again", lambda: workers(instance, "loading"))
        for path in ("new", "newer"):
            reload(instance, tmp_path, model(path, load_s=90.0))
            instance.until("one is left", lambda: len(instance.model("m").replicas) == 1)
        os.kill(pid := instance.gateway().pid, signal.SIGKILL)

        def serves_again() -> bool:
            return instance.gateway().pid != pid and instance.gateway().state == "ready"

        instance.until("the next gateway serves", serves_again)
        late = completion(pool, url, 20, stream=True)

        def waits() -> bool:
            assert not late.over.done(), late.error
            told = httpx.get(f"{url}/readyz", timeout=30).json()
            return bool(told["models"]["m"]["waiting"])

        instance.until("it waits", waits)
