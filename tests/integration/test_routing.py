"""Which replica gets a request, seen from outside: by what its cache had of the prompt."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from servekit.protocol.messages import Accepted, Reload
from servekit.supervisor.admin.control_socket import query_supervisor
from tests.integration.instance import Instance, echo, write_config
from tests.polling import poll

CACHE = 100_000
#: A conversation's first turn: 1000 characters are as many tokens to the echo engine.
FIRST = "".join(f"{number:08d}" for number in range(125))


def caching(routing: str = "auto", replicas: int = 3, **options: Any) -> dict[str, Any]:
    model = echo("m", replicas=replicas, prefix_cache_tokens=CACHE, **options)
    return model | {"routing": routing}


def cached(instance: Instance, prompt: str, headers: dict[str, str] | None = None) -> int:
    """How many of a prompt's tokens were in the cache of the worker that it came to."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 2}
    answer = httpx.post(f"{instance.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return int(usage.get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"])


def conversation(instance: Instance, opening: str, turns: int = 4) -> list[int]:
    """What each turn after the first finds of the one before it."""
    text, found = opening, []
    for turn in range(turns):
        found.append(cached(instance, text))
        text += f" and then {turn} " * 20
    return found


@pytest.mark.lane("waits")
@pytest.mark.parametrize("gateways", [1, 2])
def test_a_conversation_comes_back_to_its_cache(tmp_path: Path, gateways: int) -> None:
    with Instance.up(tmp_path, [caching()], server={"gateways": gateways}) as instance:
        instance.until_settled()
        for opening in "abcdef":
            first, *later = conversation(instance, opening + FIRST)
            assert first == 0
            assert all(found >= 960 for found in later), later


def test_in_turn_it_finds_nothing_until_all_have_read_it(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [caching("round_robin")]) as instance:
        instance.until_settled()
        assert conversation(instance, FIRST)[:3] == [0, 0, 0]
        assert cached(instance, FIRST) > 0
        # a reload changes how it is routed, and no worker
        pids = [replica.pid for replica in instance.model("m").replicas]
        write_config(tmp_path, [caching("auto")])
        answer = asyncio.run(query_supervisor(instance.run_dir / "control.sock", Reload()))
        assert isinstance(answer, Accepted), answer
        assert all(found > 0 for found in conversation(instance, "x" + FIRST)[1:])
        assert [replica.pid for replica in instance.model("m").replicas] == pids


def test_every_api_tells_what_was_cached(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [caching(replicas=1)]) as instance:
        instance.until_settled()
        cached(instance, FIRST)
        expected = (len(FIRST) - 1) // 32 * 32
        base = instance.url
        client = OpenAI(base_url=f"{base}/v1", api_key="none")
        chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": FIRST}]}
        plain = client.chat.completions.create(**chat, max_tokens=2)
        several = client.chat.completions.create(**chat, max_tokens=2, n=3)
        for answer in (plain, several):
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == expected
        options: Any = {"include_usage": True}
        *_, last = client.chat.completions.create(
            **chat, max_tokens=40, stream=True, stream_options=options
        )
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == expected
        response = client.responses.create(model="m", input=FIRST, max_output_tokens=16)
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == expected
        message = httpx.post(f"{base}/v1/messages", json=chat | {"max_tokens": 2}).json()
        assert message["usage"]["cache_read_input_tokens"] == expected
        assert message["usage"]["input_tokens"] == len(FIRST) - expected
        fresh = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "new"}], max_tokens=2
        )
        assert fresh.usage is not None
        assert fresh.usage.prompt_tokens_details is None


@pytest.mark.lane("long")
def test_a_session_stays_also_where_prompts_tell_nothing(tmp_path: Path) -> None:
    """A prompt too short to be looked at is found where its session is, and only there."""
    with Instance.up(tmp_path, [caching()]) as instance:
        instance.until_settled()
        short = FIRST[:200]
        for name in ("a", "b", "c", "d"):
            prompt = name + short
            found = [cached(instance, prompt, {"X-Session-Id": name}) for _ in range(4)]
            assert found == [0, 192, 192, 192]
            body = {"model": "m", "prompt": prompt, "max_tokens": 2, "prompt_cache_key": name}
            answer = httpx.post(f"{instance.url}/v1/completions", json=body).json()
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 192}
        # which of them the others are at is known by asking without a session
        without = [cached(instance, "a" + short) for _ in range(3)]
        assert without.count(0) == 2


def test_what_a_dead_worker_had_is_read_again_elsewhere(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [caching(replicas=2)]) as instance:
        instance.until_settled()
        openings = [letter + FIRST for letter in "abcdefgh"]
        for opening in openings:
            cached(instance, opening)
        victim = instance.model("m").replicas[0]
        os.kill(victim.pid, signal.SIGKILL)
        instance.until("it is replaced", lambda: instance.replica(victim.name).restarts == 1)
        instance.until_settled()
        again = [cached(instance, opening) for opening in openings]
        assert 0 < again.count(0) < len(openings), "half of it was there"
        assert all(cached(instance, opening) > 0 for opening in openings)


def test_an_unknown_way_of_routing_is_named(tmp_path: Path) -> None:
    path = write_config(tmp_path, [caching("fastest")])
    run = subprocess.run(
        [sys.executable, "-m", "servekit", "check", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert "models[0].routing: must be auto, least_loaded or round_robin" in run.stderr + run.stdout
    assert json.loads(path.read_text())["models"][0]["routing"] == "fastest"


# ---------------------------------------------------------------- slots, and two gateways


def connections(instance: Instance, count: int) -> dict[bytes, list[socket.socket]]:
    """Connections by the gateway that has them, `count` to each of two at least.

    The kernel deals them out; the ids that a gateway makes for requests begin alike.
    """
    port = int(instance.url.rsplit(":", 1)[1])
    found: dict[bytes, list[socket.socket]] = {}
    for _ in range(100 * count):
        made = socket.create_connection(("127.0.0.1", port), timeout=30)
        made.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        head = made.recv(65536)
        origin = head.partition(b"x-request-id: ")[2].partition(b"-")[0]
        found.setdefault(origin, []).append(made)
        if len(found) == 2 and min(map(len, found.values())) >= count:
            return found
    raise AssertionError("one gateway got next to no connections")


def test_a_gateway_uses_what_the_other_leaves(tmp_path: Path) -> None:
    """All slots with all clients at one of two gateways; the other gets its half as it comes."""
    slots, step_s = 8, 0.05
    with Instance.up(
        tmp_path, [echo("a", slots=slots, step_s=step_s)], server={"gateways": 2}
    ) as instance:
        instance.until_settled()
        first, second = connections(instance, 4 * slots).values()
        body = json.dumps({"model": "a", "prompt": "x", "max_tokens": 40}).encode()
        ask = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        began_s = time.monotonic()
        for made in first[: 2 * slots]:
            made.sendall(ask)
        poll("all slots are used", lambda: running(instance) == slots, within_s=20)
        for made in second[:slots]:
            made.sendall(ask)
        ended: dict[int, float] = {}
        with selectors.DefaultSelector() as selector:
            for at, made in enumerate((*first[: 2 * slots], *second[:slots])):
                selector.register(made, selectors.EVENT_READ, at)
            while len(ended) < 3 * slots:
                for key, _ in selector.select(timeout=30):
                    assert b" 200 OK" in key.fileobj.recv(65536)  # type: ignore[union-attr]
                    ended[key.data] = time.monotonic() - began_s
                    selector.unregister(key.fileobj)
        whole_s = 40 * step_s
        rounds = [ended[at] / whole_s for at in range(3 * slots)]
        assert sum(one < 1.8 for one in rounds[: 2 * slots]) == slots, rounds
        half = sum(one < 2.8 for one in rounds[2 * slots :])
        assert half >= slots // 2, rounds  # among those that ran in the second round
        assert max(rounds) < 4.5, rounds
        for made in (*first, *second):
            made.close()


def running(instance: Instance) -> int:
    return sum(one.running for model in instance.status().models for one in model.replicas)
