from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from servekit.protocol.messages import Accepted, Shutdown, ToSupervisor
from servekit.protocol.transport.connection import Connection, listen_at
from servekit.protocol.transport.rpc import ask_supervisor

QUESTION = Shutdown()


async def answered_by(path: Path, answer: str) -> asyncio.Server:
    """A supervisor that answers, hangs up, or says nothing."""

    def connect() -> Connection[ToSupervisor]:
        def on_message(message: ToSupervisor) -> None:
            assert message == QUESTION
            if answer == "well":
                connection.send(Accepted("done"))
            elif answer == "not":
                connection.close()

        connection: Connection[ToSupervisor] = Connection(
            ToSupervisor, on_message, lambda error: None
        )
        return connection

    return await listen_at(path, connect)


async def test_the_answer_is_passed_on(tmp_path: Path) -> None:
    server = await answered_by(tmp_path / "s", "well")
    assert await ask_supervisor(tmp_path / "s", QUESTION, 5.0) == Accepted("done")
    server.close()


@pytest.mark.parametrize(
    ("answer", "raised", "deadline_s"), [("not", EOFError, 5.0), ("late", TimeoutError, 0.05)]
)
async def test_who_does_not_answer_is_told_apart(
    tmp_path: Path, answer: str, raised: type[Exception], deadline_s: float
) -> None:
    server = await answered_by(tmp_path / "s", answer)
    with pytest.raises(raised):
        await ask_supervisor(tmp_path / "s", QUESTION, deadline_s)
    server.close()


async def test_where_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await ask_supervisor(tmp_path / "s", QUESTION, 5.0)
