from __future__ import annotations

import socket
from pathlib import Path

import pytest

from servekit.errors import ServekitError, StartError
from servekit.supervisor.control import Operators, ask
from servekit.wire.messages import Accepted, GetStatus, Shutdown, Status

STATUS = Status("1", 2, "u", "c", 0.0, 3, (), (), False)


async def test_operators_are_answered_and_heard(tmp_path: Path) -> None:
    heard: list[bool] = []
    operators = Operators(lambda: STATUS, heard.append)
    path = tmp_path / "control.sock"
    await operators.listen(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert await ask(path, GetStatus()) == STATUS
    assert await ask(path, Shutdown(True)) == Accepted()
    assert await ask(path, Shutdown()) == Accepted()
    assert heard == [True, False]
    operators.close()


async def test_nobody_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no servekit runs in"):
        await ask(tmp_path / "control.sock", GetStatus())


async def test_a_stale_socket_is_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "control.sock"))
    with pytest.raises(StartError, match="no servekit runs in"):
        await ask(tmp_path / "control.sock", GetStatus())


async def test_a_supervisor_that_does_not_answer_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "control.sock"))
        sock.listen()
        with pytest.raises(ServekitError, match=r"did not answer within 0\.1 s"):
            await ask(tmp_path / "control.sock", GetStatus(), timeout_s=0.1)


async def test_one_that_breaks_off_is_a_sentence(tmp_path: Path) -> None:
    def broken() -> Status:
        raise RuntimeError("bug")

    operators = Operators(broken, lambda now: None)
    await operators.listen(tmp_path / "control.sock")
    with pytest.raises(ServekitError, match="hung up"):
        await ask(tmp_path / "control.sock", GetStatus())
    operators.close()
