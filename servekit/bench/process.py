"""The life of one client process: it reads its order, writes reports, and ends with its stdin."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys

import msgspec

from servekit.bench.client.client_protocol import ClientLoad, FromClient, Go, Ready
from servekit.bench.load_generator import Driver
from servekit.system.rlimits import raise_file_limit

_REPORT_EVERY_S = 0.1
#: Maximum length of a line: the report of a very busy tenth of a second.
LONGEST_LINE_BYTES = 256 * 2**20


def run_client_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    raise_file_limit()  # each user is a connection
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)  # the hot path makes no cycles
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_run_client())


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class _Sent(asyncio.BaseProtocol):
    """A write pipe that knows when all data is written, or the reader is gone."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


async def _run_client() -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    out, sent = await loop.connect_write_pipe(_Sent, os.fdopen(os.dup(1), "wb"))
    order = msgspec.json.decode(await told.readline(), type=ClientLoad)
    driver = Driver(order)
    go: asyncio.Future[Go | None] = loop.create_future()
    listening = asyncio.create_task(_listen_for_end(told, driver, go))
    await driver.warm_up()
    _send_message(out, Ready())
    if (begin := await go) is not None:
        await _measure_load(driver, begin.at, out)
    listening.cancel()
    driver.close()
    out.close()  # after the buffered data
    await sent.closed


async def _listen_for_end(
    told: asyncio.StreamReader, driver: Driver, go: asyncio.Future[Go | None]
) -> None:
    """Wait for the start, then for the end of stdin, which means stop, even if the parent died."""
    line = await told.readline()
    go.set_result(msgspec.json.decode(line, type=Go) if line else None)
    await told.read()
    driver.stop_now()


async def _measure_load(driver: Driver, at: float, out: asyncio.WriteTransport) -> None:
    reporting = asyncio.create_task(_send_reports(driver, out))
    try:
        await driver.measure(at)
    finally:
        reporting.cancel()
    _send_message(out, driver.report())
    _send_message(out, driver.sum_up())


async def _send_reports(driver: Driver, out: asyncio.WriteTransport) -> None:
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        _send_message(out, driver.report())


def _send_message(out: asyncio.WriteTransport, message: FromClient) -> None:
    out.write(msgspec.json.encode(message) + b"\n")
