"""Client processes, real ones: they load a server of this test, report, and end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from servekit.bench.aggregator import Tally
from servekit.bench.client.client_protocol import ClientLoad
from servekit.bench.client.clients import Clients
from servekit.errors import ServekitError
from servekit.system.python.python_command import module_command
from tests.polling import poll
from tests.unit.bench.serving import completion, serving, whole
from tests.unit.bench.test_load_generator import order

PROGRAM = module_command("servekit.bench")


def answer(body: dict[str, object]) -> list[bytes]:
    return [whole(completion())]


async def run(orders: Sequence[ClientLoad], program: Sequence[str] = PROGRAM) -> Tally:
    async with Clients(program, os.environ) as clients:
        await clients.start(orders)
        tally = Tally(clients.start_load(), {})
        await clients.read_into(tally)
        processes = clients._processes
    assert all(process.returncode is not None for process in processes), "none is left"
    return tally


async def test_all_clients_begin_together_and_their_reports_are_added() -> None:
    async with serving(answer) as server:
        orders = [
            order(server.target, stream=False, requests=3, index=index, clients=2, warmup=1)
            for index in range(2)
        ]
        tally = await run(orders)
    assert (tally.completed, tally.failed, tally.sent) == (6, 0, 6)
    assert len(server.bodies) == 8, "with one request of each to warm up"


async def test_users_are_not_bounded_by_the_usual_limit_of_files() -> None:
    shell = ["/bin/sh", "-c", 'ulimit -Sn 32 && exec "$@"', "sh", *PROGRAM]
    async with serving(answer) as server:
        tally = await run([order(server.target, stream=False, users=60, requests=120)], shell)
    assert (tally.completed, tally.failed) == (120, 0), tally.failures


async def test_a_client_that_is_told_to_stop_reports_what_it_has() -> None:
    async with serving(answer) as server, Clients(PROGRAM, os.environ) as clients:
        await clients.start([order(server.target, stream=False, duration_s=600.0)])
        tally = Tally(clients.start_load(), {})
        began = time.monotonic()

        def stop_and_answer(body: dict[str, object]) -> list[bytes]:
            clients.stop()
            return answer(body)

        server.answer = stop_and_answer
        await clients.read_into(tally)
    assert time.monotonic() - began < 60
    assert tally.sent > 0


async def test_clients_end_with_their_context_even_before_the_start() -> None:
    async with serving(answer) as server, Clients(PROGRAM, os.environ) as clients:
        await clients.start([order(server.target, stream=False, duration_s=600.0)])
        [process] = clients._processes
        there = Path(f"/proc/{process.pid}")
    poll("it is gone", lambda: not there.exists())


async def test_a_client_that_dies_is_told_with_its_last_words() -> None:
    async with serving(answer) as server:
        orders = [order(server.target, stream=False, requests=1)]
        words = "import sys; sys.exit('x' * 600 + ' no memory')"
        with pytest.raises(ServekitError) as error:
            await run(orders, [sys.executable, "-c", words])
    assert error.value.message == f"a client process ended with code 1: {'x' * 490} no memory"


async def test_a_program_that_is_no_client_is_told() -> None:
    async with serving(answer) as server:
        orders = [order(server.target, stream=False, requests=1)]
        said = '{"type":"report","records":[],"gaps":{},"sent":0,"in_flight":0,"chunks":0}'
        with pytest.raises(ServekitError, match="unexpected message"):
            await run(orders, [sys.executable, "-c", f"print('''{said}''')"])
