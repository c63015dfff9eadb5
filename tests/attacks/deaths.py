"""Attacks on workers: the engine raises, its core is killed, requests that take workers with them,
a reload in the middle of a stream.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import string
import time
from collections.abc import Awaitable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tests.attacks.client import Answer
from tests.attacks.scene import Attack, Scene, children, due_text, fragile

POISON = "boom"


def two_replicas(folder: Path) -> list[dict[str, Any]]:
    return [fragile(folder, replicas=2)]


def two_cores(folder: Path) -> list[dict[str, Any]]:
    return [fragile(folder, replicas=2, options={"core": True})]


async def raise_in_step(scene: Scene) -> None:
    """20 streams and 10 whole answers run while one request makes the step raise."""
    crowd = [scene.ask_fragile(2 * n, 200) for n in range(20)]
    crowd += [scene.ask_fragile(2 * n + 1, 200) for n in range(10)]
    running = asyncio.ensure_future(scene.ask_all(crowd))
    await asyncio.sleep(0.5)
    answer = await scene.client.complete("m", POISON, 50, stream=False)
    expect_quarantine(scene, answer)
    await running
    await scene.until_serving(2)
    await scene.expect_deaths(3, "one request")


async def send_poison_again(scene: Scene) -> None:
    """The same poison five times: the first is tried, the others are refused at once."""
    async with scene.bystanders(4, scene.ask_fragile):
        for _ in range(5):
            answer = await scene.client.complete("m", POISON, 50, stream=True)
            expect_quarantine(scene, answer)
    await scene.until_serving(2)
    await scene.expect_deaths(3, "one request")


def expect_quarantine(scene: Scene, answer: Answer) -> None:
    scene.account.check_form(answer)
    scene.account.expect(
        answer.error == "request_quarantined", f"poison was answered {answer.error!r}"
    )


async def crowd_a_dying_engine(scene: Scene) -> None:
    """16 clients ask short questions as fast as they can while the engine beside them dies."""

    async def ask(number: int) -> tuple[Answer, str]:
        return await scene.ask_fragile(2 * number + 1, 1)

    async with scene.bystanders(16, ask):
        await asyncio.sleep(1.0)
        await scene.client.complete("m", POISON, 50, stream=False)
        await asyncio.sleep(2.0)
    await scene.until_serving(2)


async def kill_core(scene: Scene) -> None:
    """The process below a worker is killed under 64 streams, twice."""
    running = asyncio.ensure_future(
        scene.ask_all([scene.ask_fragile(2 * n, 400) for n in range(64)])
    )
    for turn in range(2):
        await asyncio.sleep(0.7)
        [core] = children((await scene.workers())[turn])
        os.kill(core, signal.SIGKILL)
        await scene.until_replaced(turn + 1)
    await running


async def hang_up_after_poison(scene: Scene) -> None:
    """One client sends poison ten times a second and hangs up at once; the others are served."""

    async def send(number: int) -> None:
        body = b'{"model": "m", "prompt": "boom %d", "max_tokens": 50}' % number
        _, writer = await asyncio.open_connection(scene.client.host, scene.client.port)
        writer.write(scene.client.request("POST", "/v1/completions", body))
        await writer.drain()
        await asyncio.sleep(0.03)
        writer.transport.abort()

    async with scene.bystanders(8, scene.ask_fragile):
        for number in range(100):
            await send(number)
            await asyncio.sleep(0.07)
    await scene.until_serving(2)
    await scene.expect_deaths(20, "one client that hangs up")


async def send_different_poisons(scene: Scene) -> None:
    """25 poisons that differ by a byte, from one client, beside ordinary ones."""
    async with scene.bystanders(8, scene.ask_fragile):
        for number in range(25):
            answer = await scene.client.complete("m", f"boom {number}", 50, stream=False)
            scene.account.check_form(answer)
            scene.account.expect(answer.failed, "poison was answered")
    await scene.until_serving(2)
    await scene.expect_deaths(20, "one client's 25 requests")


async def send_poison_for_a_minute(scene: Scene, bystanders: str) -> int:
    """Send poison after poison, of random letters; return how often its source was refused."""
    others = replace(scene.client, address=bystanders)
    until_s, refused = time.monotonic() + 60.0, 0
    async with scene.bystanders(8, lambda n: scene.ask_fragile(n, client=others)):
        while time.monotonic() < until_s:
            answer = await send_random_poison(scene)
            refused += answer.error == "source_quarantined"
            await asyncio.sleep(0.1 if answer.status == 429 else 0.0)
    await scene.until_serving(2)
    await scene.expect_deaths(20, "one client in a minute")
    return refused


async def share_an_address_with_poison(scene: Scene) -> None:
    """A minute of poison from the address of all clients, who are served."""
    refused = await send_poison_for_a_minute(scene, "127.0.0.1")
    scene.account.expect(refused == 0, "the address of clients that are served was refused")


async def send_poison_from_own_address(scene: Scene) -> None:
    """A minute of poison; all other clients have another address."""
    refused = await send_poison_for_a_minute(scene, "127.0.0.2")
    scene.account.expect(refused > 0, "the address of one client that kills was never refused")


async def send_random_poison(scene: Scene) -> Answer:
    letters = "".join(random.choices(string.ascii_lowercase, k=12))
    answer = await scene.client.complete("m", f"{POISON} {letters}", 50, stream=False)
    scene.account.check_form(answer)
    scene.account.expect(answer.failed, "poison was answered")
    return answer


async def reload_another_model(scene: Scene) -> None:
    """The file names another model under the same name while streams run that outlast the drain.

    A stream is the old model's to its end, or ends with an error that says why; a whole answer is
    one model's alone.
    """

    async def ask(number: int, tokens: int, stream: bool) -> None:
        prompt = f"question {number}"
        answer = await scene.client.complete("m", prompt, tokens, stream=stream)
        scene.account.requests += 1
        scene.account.check_form(answer)
        texts = [due_text(voice, prompt, tokens) for voice in ("upper", "lower")]
        if stream and answer.error:  # said so, after text of one model alone
            whole = texts[0].startswith(answer.text)
            scene.account.expect(
                whole, f"{answer.text[:20]!r}…{answer.text[-20:]!r}, then an error"
            )
            scene.account.complain(f"a stream was cut by a reload: {answer.error}")
        else:
            scene.account.expect(not answer.failed, f"{answer.status} {answer.error}")
            scene.account.expect(
                answer.text in texts,
                f"two models in a text (number {number}: second from {seam(answer.text)} on)",
            )

    running: list[Awaitable[None]] = [
        asyncio.ensure_future(ask(n, 800, stream=n % 2 == 0)) for n in range(12)
    ]
    await asyncio.sleep(1.0)
    write_voice(scene, "lower")
    await asyncio.to_thread(scene.instance.reload)  # nohup would have it ignore SIGHUP
    await asyncio.gather(*running)

    async def is_new() -> bool:
        return (await scene.client.complete("m", "q", 20, stream=False)).text == due_text(
            "lower", "q", 20
        )

    for _ in range(100):
        if await is_new():
            return
        await asyncio.sleep(0.1)
    scene.account.complain("the new model does not answer after the reload")


async def reload_after_quarantine(scene: Scene) -> None:
    """A reload of the same file lifts no quarantine; one with another model does."""
    for _ in range(2):
        expect_quarantine(scene, await scene.client.complete("m", POISON, 50, stream=False))
    await scene.until_serving(2)
    deaths = await scene.restarts()
    await asyncio.to_thread(scene.instance.reload)  # nohup would have it ignore SIGHUP
    for _ in range(20):
        await asyncio.sleep(0.1)
        expect_quarantine(scene, await scene.client.complete("m", POISON, 50, stream=False))
    await scene.expect_deaths(deaths, "a request in quarantine")
    write_voice(scene, "lower", options={"raise_on": "nothing of that"})
    await asyncio.to_thread(scene.instance.reload)  # nohup would have it ignore SIGHUP

    async def is_answered() -> bool:
        answer = await scene.client.complete("m", POISON, 20, stream=False)
        scene.account.check_form(answer)
        return answer.text == due_text("lower", POISON, 20)

    await scene.until("another model answers the quarantined request", is_answered, 20.0)


def seam(text: str) -> int:
    """Return where the text of the second model begins."""
    return next((at for at, (a, b) in enumerate(pairwise(text)) if a.isupper() != b.isupper()), -1)


def write_voice(scene: Scene, voice: str, **changes: Any) -> None:
    """Have the configuration name a model of another voice."""
    path = scene.folder / "servekit.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["models"][0] |= fragile(scene.folder, voice=voice, **changes)
    path.write_text(yaml.safe_dump(settings))


ATTACKS = [
    Attack("raise-in-step", "the step raises under 30 requests", two_replicas, raise_in_step),
    Attack("same-poison", "the same poison five times", two_replicas, send_poison_again),
    Attack(
        "crowd-on-dying-engine",
        "short requests beside an engine that dies",
        two_replicas,
        crowd_a_dying_engine,
    ),
    Attack("core-killed", "the process below a worker is killed", two_cores, kill_core),
    Attack(
        "poison-and-hang-up",
        "100 poisons whose client hangs up at once",
        two_replicas,
        hang_up_after_poison,
    ),
    Attack(
        "poison-and-hang-up-2",
        "100 poisons whose client hangs up at once, 2 gateways",
        two_replicas,
        hang_up_after_poison,
        server={"gateways": 2},
    ),
    Attack("other-poison", "25 poisons that differ", two_replicas, send_different_poisons),
    Attack(
        "other-poison-2",
        "25 poisons that differ, 2 gateways",
        two_replicas,
        send_different_poisons,
        server={"gateways": 2},
    ),
    Attack(
        "random-poison",
        "a minute of poison of random letters",
        two_replicas,
        share_an_address_with_poison,
    ),
    Attack(
        "random-poison-2",
        "a minute of poison of random letters, 2 gateways",
        two_replicas,
        share_an_address_with_poison,
        server={"gateways": 2},
    ),
    Attack(
        "lone-poisoner",
        "the same from an address of its own",
        two_replicas,
        send_poison_from_own_address,
    ),
    Attack(
        "lone-poisoner-2",
        "the same from an address of its own, 2 gateways",
        two_replicas,
        send_poison_from_own_address,
        server={"gateways": 2},
    ),
    Attack(
        "reload-other-model",
        "another model under the same name",
        two_replicas,
        reload_another_model,
        server={"drain_timeout_s": 2},
    ),
    Attack(
        "reload-and-quarantine",
        "reloads while a request is in quarantine",
        two_replicas,
        reload_after_quarantine,
    ),
]
