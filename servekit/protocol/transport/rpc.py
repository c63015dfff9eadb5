"""One question of an operator's to the supervisor, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from servekit.protocol.messages import FromSupervisor, ToSupervisor
from servekit.protocol.transport.connection import Connection, dial

#: How the supervisor is asked: by way of the operators' socket, or as who can reach it has it.
Put = Callable[[ToSupervisor, float], Awaitable[FromSupervisor]]
Way = Path | Put


async def put(path: Path, question: ToSupervisor, deadline_s: float) -> FromSupervisor:
    """What the supervisor behind the socket `path` answers.

    Raises EOFError if it hangs up, TimeoutError after `deadline_s`, and OSError (of which
    TimeoutError is one) where nobody listens.
    """
    answer: asyncio.Future[FromSupervisor] = asyncio.get_running_loop().create_future()

    def on_message(message: FromSupervisor) -> None:
        if not answer.done():
            answer.set_result(message)

    def on_close(error: Exception | None) -> None:
        if not answer.done():
            answer.set_exception(EOFError("the supervisor hung up"))

    async with asyncio.timeout(deadline_s):
        connection = await dial(path, lambda: Connection(FromSupervisor, on_message, on_close))
        try:
            connection.send(question)
            return await answer
        finally:
            connection.close()
