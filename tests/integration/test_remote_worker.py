"""Workers that are reached over TCP, a real gateway, and a supervisor that comes and goes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from servekit.protocol.messages import Ready, Stop
from servekit.protocol.transport.tls import Authority
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.polling import poll_async

PROMPT = "abcdefghij"
TOKENS = 100
TEXT = PROMPT * (TOKENS // len(PROMPT))


def shown(pid: int) -> bytes:
    """What others may see of a process."""
    folder = Path(f"/proc/{pid}")
    return (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()


@pytest.mark.lane("long")
async def test_requests_are_answered_and_outlive_a_worker(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        one, other = await asyncio.gather(
            cluster.ready("echo/0", step_s=0.02), cluster.ready("echo/1", step_s=0.02)
        )
        await cluster.gateway()
        await cluster.connected(2)
        for node in (one, other):
            assert b"BEGIN" not in shown(node.process.pid), "no key, and no certificate"
        streams = [asyncio.create_task(cluster.complete(PROMPT, TOKENS)) for _ in range(4)]
        await one.until_busy()
        one.kill()
        assert await asyncio.wait_for(asyncio.gather(*streams), DEADLINE_S) == [TEXT] * 4
        assert one.child is not None
        assert str(await asyncio.wait_for(one.child.exited, DEADLINE_S)) == "killed by SIGKILL"
        assert re.search('"worker": "echo/0".*"worker_lost"', cluster.said)


async def test_workers_serve_on_without_a_supervisor_and_are_adopted(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        node = await cluster.ready("echo/0", step_s=0.02)
        await cluster.gateway()
        await cluster.connected(1)
        stream = asyncio.create_task(cluster.complete(PROMPT, TOKENS))
        await node.until_busy()
        assert node.child is not None
        node.child.disconnect()  # the supervisor is gone
        await poll_async("it says so", lambda: "supervisor_lost" in node.log)
        assert await cluster.complete("xy", 4) == "xyxy"
        adopted = await cluster.attach(node, load=False)
        assert (adopted.state, adopted.pid) == ("ready", node.process.pid)
        assert adopted.spec == node.spec
        await poll_async("it tells all anew", lambda: node.has(Ready))
        assert await asyncio.wait_for(stream, DEADLINE_S) == TEXT, "nothing was restarted"
        exit_ = await asyncio.wait_for(adopted.stop(Stop(), DEADLINE_S), DEADLINE_S)
        assert (exit_.code, exit_.cause) == (0, "")


async def test_without_a_supervisor_a_worker_ends_after_its_grace(tmp_path: Path) -> None:
    async with Cluster(tmp_path, grace_s=0.5) as cluster:
        node = await cluster.worker("echo/0")
        (await cluster.attach(node, load=False)).disconnect()
        await asyncio.wait_for(node.process.wait(), DEADLINE_S)
        assert "no supervisor for 0.5 s" in node.log


async def test_a_gateway_of_another_cluster_serves_nothing_and_says_why(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        node = await cluster.ready("echo/0")
        await cluster.gateway(Authority.new("test").issue("gateway", "gateway/0"))
        await poll_async("the gateway says why", lambda: "of another cluster" in cluster.said)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S) as client:
            assert (await client.get("/readyz")).status_code == 503
        assert cluster.said.count("worker_unreachable") < 3, "it is not said for each attempt"
        assert "worker_connected" not in cluster.said
        assert node.process.returncode is None


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("tcp://192.0.2.1:0", "cannot listen on tcp://192.0.2.1:0"),
        ("tcp://here", "tcp://HOST:PORT"),
    ],
)
async def test_an_address_that_is_not_to_be_had_is_named(
    listen: str, said: str, tmp_path: Path
) -> None:
    async with Cluster(tmp_path) as cluster:
        with pytest.raises(AssertionError, match=said):
            await cluster.worker("echo/0", listen=listen)


async def test_a_certificate_that_is_not_valid_here_is_named(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        expired = cluster.authority.issue("worker", "echo/0", life_s=-10.0)
        with pytest.raises(AssertionError, match="has expired"):
            await cluster.worker("echo/0", credentials=expired)


@pytest.mark.lane("waits")
async def test_an_instance_outlives_its_certificates(tmp_path: Path) -> None:
    async with Cluster(tmp_path, life_s=10.0) as cluster:
        first = await cluster.ready("echo/0", step_s=0.02)
        await cluster.gateway()
        await cluster.connected(1)
        over_at = time.time() + 10.0  # by then what they began with is of no use
        stream = asyncio.create_task(cluster.complete(PROMPT, 2 * TOKENS * 5))

        def renewed() -> bool:
            cluster.renew()
            said = "certificate_renewed"
            return time.time() > over_at and said in first.log and said in cluster.said

        await poll_async("all certificates are new ones", renewed)
        second = await cluster.ready("echo/1")
        cluster.publish()
        await cluster.connected(2)  # by a gateway that shows its new one
        adopted = await cluster.attach(first, load=False)  # a worker that shows its new one
        assert adopted.state == "ready"
        assert await asyncio.wait_for(stream, DEADLINE_S) == TEXT * 10, "what stood has gone on"
        assert second.process.returncode is None


async def test_a_worker_dies_with_who_launched_it(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        launcher = await asyncio.create_subprocess_exec("sleep", "600")
        try:
            with pytest.raises(AssertionError):  # it is not its parent, so it ends at once
                await cluster.worker("echo/0", args=("--parent-pid", str(launcher.pid)))
        finally:
            os.kill(launcher.pid, signal.SIGKILL)
            await launcher.wait()
