"""Clients whose requests kill workers, and do not wait to see it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import string
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api_keys import new_key
from tests.integration.instance import Instance, echo, write_config
from tests.integration.test_faults_supervisor import cli
from tests.polling import poll

pytestmark = pytest.mark.timeout(180)

TEXT = "the quick brown fox "
FOR_S = 15.0
GOOD, GOOD_HASH = new_key("good")
BAD, BAD_HASH = new_key("bad")
INNOCENTS = 20  # more of one address than a key may have waiting


def hang_up(url: str, prompt: str, key: str = "") -> None:
    """Ask for a completion, and be gone."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 5}).encode()
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}:{port}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as one:
        one.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        time.sleep(0.02)  # long enough to be read, not to be answered


def complete(
    url: str, prompt: str, tokens: int, key: str = "", address: str | None = None
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens}
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(transport=transport, headers=headers, timeout=90) as client:
        return client.post(f"{url}/v1/completions", json=body)


def restarts(instance: Instance) -> int:
    return sum(one.restarts for one in instance.model("m").replicas)


def keep_asking(
    url: str, over: threading.Event, key: str = "", address: str | None = None
) -> tuple[int, list[str]]:
    """How many answers were right, and all that was not."""
    right, wrong = 0, []
    while not over.is_set():
        answer = complete(url, TEXT, 40, key, address)
        if answer.status_code == 200 and answer.json()["choices"][0]["text"] == TEXT * 2:
            right += 1
        else:
            wrong.append(answer.text)
    return right, wrong


@pytest.mark.lane("chaos")
@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize("same", [True, False])
def test_poison_whose_client_hangs_up_at_once_takes_few_workers(
    tmp_path: Path, gateways: int, same: bool
) -> None:
    """Ten a second from the one address that all others have, too."""
    models = [echo("m", replicas=2, step_s=0.02, crash_on="poison", slots=16)]
    with (
        ThreadPoolExecutor(INNOCENTS) as pool,
        Instance.up(tmp_path, models, server={"gateways": gateways}) as instance,
    ):
        url = instance.until_settled().url
        over = threading.Event()
        innocents = [pool.submit(keep_asking, url, over) for _ in range(INNOCENTS)]
        until_s, number = time.monotonic() + FOR_S, 0
        while time.monotonic() < until_s:
            number += 1
            hang_up(url, "poison" if same else f"poison {number}")
            time.sleep(0.08)  # ten a second are what is tested
        over.set()
        done = [one.result(90) for one in innocents]
        taken = restarts(instance)
        print("poison", number, "workers", taken, "answered", [right for right, _ in done])
        failed = [said for _, wrong in done for said in wrong]
        assert failed == []
        assert min(right for right, _ in done) > 0
        assert taken <= 9 * gateways


@pytest.mark.lane("long")
def test_an_address_is_refused_whichever_gateway_it_reaches(tmp_path: Path) -> None:
    """No two of its requests look alike; the other clients have another address."""
    models = [echo("m", replicas=2, step_s=0.02, crash_on="poison", slots=16)]
    with (
        ThreadPoolExecutor(3) as pool,
        Instance.up(tmp_path, models, server={"gateways": 2}) as instance,
    ):
        url = instance.until_settled().url
        over = threading.Event()
        others = [pool.submit(keep_asking, url, over, address="127.0.0.2") for _ in range(3)]
        codes: list[str] = []
        while len(codes) < 12 and "source_quarantined" not in codes:
            words = "".join(random.choices(string.ascii_letters, k=12))
            codes.append(complete(url, f"poison {words}", 5).json()["error"]["code"])
        for _ in range(10):  # each on a connection of its own: both gateways are met
            assert complete(url, "harmless", 5).status_code == 429
        assert complete(url, TEXT, 40, address="127.0.0.2").status_code == 200
        over.set()
        done = [one.result(90) for one in others]
        assert all(wrong == [] for _, wrong in done), done
        assert min(right for right, _ in done) > 0
        assert restarts(instance) <= 12, codes


@pytest.mark.lane("long")
def test_the_holder_of_a_key_is_refused_and_the_others_are_not(tmp_path: Path) -> None:
    """Each request is another one by a byte, and its client waits."""
    models = [echo("m", replicas=2, step_s=0.02, crash_on="poison", slots=16)]
    rules = [{"name": "good", "hash": GOOD_HASH}, {"name": "bad", "hash": BAD_HASH}]
    with (
        ThreadPoolExecutor(30) as pool,
        Instance.up(tmp_path, models, sections={"keys": rules}) as instance,
    ):
        url = instance.until_settled().url
        over = threading.Event()
        innocents = [pool.submit(keep_asking, url, over, GOOD) for _ in range(3)]
        began = time.monotonic()
        asked = [pool.submit(complete, url, f"poison {n}", 5, BAD) for n in range(25)]
        answers = [one.result(120) for one in asked]
        took_s = time.monotonic() - began
        errors = {(e := answer.json()["error"])["code"]: e["message"] for answer in answers}
        assert errors.keys() <= {"request_quarantined", "source_quarantined"}, errors
        [refused] = [complete(url, "harmless", 5, BAD)]
        assert refused.status_code == 429, (refused.text, errors)
        assert refused.json()["error"]["code"] == "source_quarantined"
        assert "the key 'bad'" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert complete(url, TEXT, 40, GOOD).status_code == 200
        over.set()
        done = [one.result(90) for one in innocents]
        assert all(wrong == [] for _, wrong in done), done
        taken = restarts(instance)
        print("25 unique: workers", taken, "in", round(took_s, 1), "s")
        assert taken <= 12


@pytest.mark.lane("chaos")
def test_deadly_requests_of_many_addresses_are_found_one_by_one(tmp_path: Path) -> None:
    """No two of them look alike or come from one source, so only their turns alone tell them."""
    models = [echo("m", replicas=2, step_s=0.02, crash_on="poison", slots=16)]
    with ThreadPoolExecutor(9) as pool, Instance.up(tmp_path, models) as instance:
        url = instance.until_settled().url
        over = threading.Event()
        innocents = [pool.submit(keep_asking, url, over, address="127.0.0.2") for _ in range(3)]
        asked = []
        for number in range(6):
            words = "".join(random.choices(string.ascii_letters, k=12))
            origin = f"127.0.1.{number + 1}"
            asked.append(pool.submit(complete, url, f"poison {words}", 5, address=origin))
            time.sleep(0.5)  # so that each worker that comes up meets a new one
        codes = [one.result(120).json()["error"]["code"] for one in asked]
        assert codes == ["request_quarantined"] * len(asked)
        assert complete(url, TEXT, 40, address="127.0.0.2").status_code == 200
        over.set()
        done = [one.result(90) for one in innocents]
        print("6 addresses: workers", restarts(instance), "answered", [right for right, _ in done])
        assert all(wrong == [] for _, wrong in done), done


@pytest.mark.lane("chaos")
def test_workers_killed_from_outside_are_held_against_nobody(tmp_path: Path) -> None:
    """Many clients of one address, short answers, and a kill -9 about every second."""
    models = [echo("m", replicas=2, step_s=0.01, slots=32)]
    with ThreadPoolExecutor(16) as pool, Instance.up(tmp_path, models) as instance:
        url = instance.until_settled().url
        over = threading.Event()
        clients = [pool.submit(keep_asking, url, over) for _ in range(16)]
        until_s, dice = time.monotonic() + FOR_S, random.Random(7)
        while time.monotonic() < until_s:
            time.sleep(dice.uniform(0.5, 1.5))  # between two kills, which are what is tested
            living = [one.pid for one in instance.model("m").replicas if one.state == "ready"]
            if living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(living), signal.SIGKILL)
        over.set()
        done = [one.result(90) for one in clients]
        assert all(wrong == [] for _, wrong in done), done
        assert "source_quarantined" not in instance.log


@pytest.mark.lane("long")
def test_a_reload_with_another_model_lifts_a_quarantine(tmp_path: Path) -> None:
    bad: dict[str, Any] = echo("m", replicas=2, crash_on="poison")
    with Instance.up(tmp_path, [bad]) as instance:
        url = instance.until_settled().url
        for _ in range(2):
            answer = complete(url, "poison", 5)
            assert answer.json()["error"]["code"] == "request_quarantined"
        write_config(tmp_path, [echo("m", replicas=2) | {"path": "mended"}])
        assert cli(instance, "reload").returncode == 0

        def mended() -> bool:
            return complete(url, "poison", 6).status_code == 200

        poll("it is served by the other model", mended, 30)
