"""Workers on machines of their own, and what becomes of requests when the network fails them.

Four machines: the gateway and the supervisor on one, each worker on another, behind a cable of its
own. Every stream ends with its whole text, whatever happens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import network
from tests.integration.cluster import DEADLINE_S, Cluster, Node

PROMPT = "abcdefghij"
TOKENS = 100
TEXT = PROMPT * (TOKENS // len(PROMPT))
#: As `--lost-s` here; nothing below depends on how long it takes, up to DEADLINE_S.
LOST_S = 4.0

pytestmark = [
    pytest.mark.skipif(bool(network.why_not()), reason=network.why_not()),
    pytest.mark.lane("chaos"),
]


async def under_load(
    cluster: Cluster, nodes: list[Node], happens: Callable[[], object], streams: int = 4
) -> None:
    """Have it happen while streams run at all of them, and see that all of them are whole."""
    asked = [asyncio.create_task(cluster.complete(PROMPT, TOKENS)) for _ in range(streams)]
    await asyncio.gather(*(node.until_busy() for node in nodes))
    happens()
    assert await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S) == [TEXT] * streams


def lost(cluster: Cluster, node: Node) -> int:
    """How often the gateway has said so."""
    name = f'"worker": "{node.name}"'
    return sum(name in line and "worker_lost" in line for line in cluster.said.splitlines())


def test_no_request_is_lost_to_the_network(tmp_path: Path) -> None:
    """One fault after the other, each with another worker: a start takes longer than a fault."""

    async def whole() -> None:
        async with Cluster(tmp_path, lost_s=LOST_S) as cluster:
            nodes = await asyncio.gather(
                *(cluster.ready(f"echo/{n}", apart=n + 1, step_s=0.02) for n in range(3))
            )
            await cluster.gateway()
            await cluster.connected(3)
            await far_away(cluster, nodes)
            await far_away_and_slow(cluster, nodes)
            killed, powerless, unplugged = nodes
            await unplugged_for_a_while(cluster, nodes, unplugged)
            await killed_at_once(cluster, nodes, killed)
            await without_power(cluster, [powerless, unplugged], powerless)
            assert lost(cluster, unplugged) == 1, "once, when it was"

    network.elsewhere(whole)


async def far_away(cluster: Cluster, nodes: list[Node]) -> None:
    """50 ms there and back, and nothing happens."""
    for node in nodes:
        node.wire.say(delay_s=0.025)
    await under_load(cluster, nodes, lambda: None)
    assert not any(lost(cluster, node) for node in nodes)


async def far_away_and_slow(cluster: Cluster, nodes: list[Node]) -> None:
    """A prompt takes longer to arrive than a peer may be silent, and that is no silence."""
    prompt = PROMPT * 120_000
    for node in nodes:
        node.wire.say(bytes_per_s=len(prompt) / LOST_S / 1.2, delay_s=0.025)
    began = time.monotonic()
    assert await cluster.complete(prompt, TOKENS) == TEXT
    assert time.monotonic() - began > LOST_S, "it was slow"
    assert not any(lost(cluster, node) for node in nodes)
    for node in nodes:
        node.wire.say()


async def unplugged_for_a_while(cluster: Cluster, nodes: list[Node], unplugged: Node) -> None:
    """Its requests go elsewhere, and when it is plugged in again it is one of them again."""
    await under_load(cluster, nodes, unplugged.wire.down)
    assert lost(cluster, unplugged) == 1
    unplugged.wire.up()
    await cluster.connected(len(nodes) + 1)
    await under_load(cluster, nodes, lambda: None)
    assert unplugged.child is not None
    assert not unplugged.child.exited.done()


async def killed_at_once(cluster: Cluster, nodes: list[Node], killed: Node) -> None:
    """All its processes are, and its kernel says so."""
    await under_load(cluster, nodes, killed.kill)
    assert killed.child is not None
    await asyncio.wait_for(asyncio.shield(killed.child.exited), DEADLINE_S)
    assert lost(cluster, killed) == 1


async def without_power(cluster: Cluster, nodes: list[Node], powerless: Node) -> None:
    """Nobody says anything, and nobody will."""
    await cluster.attach(powerless, load=False, node_lost_s=1.5 * LOST_S)
    await under_load(cluster, nodes, lambda: powerless.wire.say(cut=True))
    assert lost(cluster, powerless) == 1
    assert powerless.child is not None
    exit_ = await asyncio.wait_for(asyncio.shield(powerless.child.exited), DEADLINE_S)
    assert "node lost: no answer for" in str(exit_)
