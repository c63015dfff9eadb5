"""The client processes of one load."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

import msgspec

from servekit.bench.aggregator import Tally
from servekit.bench.client.client_protocol import (
    ClientLoad,
    Ended,
    FromClient,
    Go,
    Ready,
    Report,
)
from servekit.bench.process import LONGEST_LINE_BYTES
from servekit.errors import ServekitError

#: Delay of the start, for Go to reach all clients.
_LEAD_S = 0.02
#: Characters of a dead client's stderr in the error.
_LAST_WORDS = 500

_decode = msgspec.json.Decoder(FromClient).decode


class Clients:
    """An async context of client processes; at its end no process is left."""

    def __init__(self, program: Sequence[str], environ: Mapping[str, str]) -> None:
        self._program = program  # starts `servekit.bench.process.run_client_process`
        self._environ = environ
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()

    async def start(self, orders: Sequence[ClientLoad]) -> None:
        """Start one process per order, and wait until all are warm. Raises ServekitError."""
        for order in orders:
            process = await asyncio.create_subprocess_exec(
                *self._program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(self._environ),
                limit=LONGEST_LINE_BYTES,
            )
            self._processes.append(process)
            await _send_order(process, order)
        for process in self._processes:
            if not isinstance(await _read_message(process), Ready):
                raise ServekitError("a client process sent an unexpected message")

    def start_load(self) -> float:
        """Start the load in all clients at the same time, which is returned."""
        at = time.monotonic() + _LEAD_S
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(Go(at)) + b"\n")
        return at

    async def read_into(self, tally: Tally) -> None:
        """Read all reports until the clients have ended. Raises ServekitError if one dies."""
        await asyncio.gather(
            *(self._read(index, process, tally) for index, process in enumerate(self._processes))
        )

    async def _read(self, index: int, process: asyncio.subprocess.Process, tally: Tally) -> None:
        while True:
            message = await _read_message(process)
            if isinstance(message, Report):
                tally.report(index, message)
            elif isinstance(message, Ended):
                tally.add_end(message)
                return

    def stop(self) -> None:
        """Stop all clients now; they report the data so far, and end."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()


async def _send_order(process: asyncio.subprocess.Process, order: ClientLoad) -> None:
    """Write an order to stdin, since it may hold a key: command lines are visible to everybody."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # `_read_message` reports the cause
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        await process.stdin.drain()


async def _read_message(process: asyncio.subprocess.Process) -> FromClient:
    assert process.stdout is not None and process.stderr is not None
    line = await process.stdout.readline()
    if line.endswith(b"\n"):
        message: FromClient = _decode(line)
        return message
    words = (await process.stderr.read()).decode(errors="replace").strip()
    code = await process.wait()
    raise ServekitError(f"a client process ended with code {code}: {words[-_LAST_WORDS:]}")
