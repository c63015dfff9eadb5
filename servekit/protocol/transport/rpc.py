"""A single request of an operator to the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from servekit.protocol.messages import FromSupervisor, ToSupervisor
from servekit.protocol.transport.connection import Connection, dial_address

#: A way to ask the supervisor: the path of the operators' socket, or a function that can reach it.
Put = Callable[[ToSupervisor, float], Awaitable[FromSupervisor]]
Way = Path | Put


async def ask_supervisor(path: Path, question: ToSupervisor, deadline_s: float) -> FromSupervisor:
    """Send a question to the supervisor behind the socket `path`, and return its answer.

    Raises EOFError if it hangs up, TimeoutError after `deadline_s`, and OSError (of which
    TimeoutError is one) where nobody listens.
    """
    answer: asyncio.Future[FromSupervisor] = asyncio.get_running_loop().create_future()

    def on_message(message: FromSupervisor) -> None:
        if not answer.done():
            answer.set_result(message)

    def on_close(error: Exception | None) -> None:
        if not answer.done():
            answer.set_exception(EOFError("the supervisor closed the connection"))

    async with asyncio.timeout(deadline_s):
        connection = await dial_address(
            path, lambda: Connection(FromSupervisor, on_message, on_close)
        )
        try:
            connection.send(question)
            return await answer
        finally:
            connection.close()
