"""The log's tail: bounded, and data whatever is in it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from servekit.gateway.ui.pages.language import SAY_ENGLISH
from servekit.gateway.ui.widgets import log_tail
from servekit.log_files import LogLine


def ours(second: int, event: str, **fields: object) -> str:
    at = f"2026-01-01T10:00:{second:02}.0Z"
    return json.dumps({"timestamp": at, "level": "warning", "event": event, **fields}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def write(folder: Path, name: str, text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    folder.joinpath("logs", f"{name}.log").write_bytes(data)


async def test_lines_of_all_stand_in_their_order(folder: Path) -> None:
    write(folder, "m~0", ours(1, "one") + ours(3, "three", request="r-1"))
    write(folder, "gateway-0", ours(2, "two"))
    reader = log_tail.Tail(folder)
    assert await reader.names() == ["gateway/0", "m/0"]
    found = [(line.name, log_tail.parse_line(line.text)[1]) for line in await reader.lines("")]
    assert found == [("m/0", "one"), ("gateway/0", "two"), ("m/0", "three request=r-1")]
    assert [line.name for line in await reader.lines("m")] == ["m/0", "m/0"]
    page = log_tail.render_log(await reader.lines(""), SAY_ENGLISH)
    assert page.index("three") < page.index("two") < page.index("one")
    assert (
        '<li class="sk-warning"><time>2026-01-01 10:00:03</time> <b>m/0</b> three request=r-1'
        in page
    )


async def test_what_is_written_is_data(folder: Path) -> None:
    bad = "\x1b[2J\x1b]0;title\x07<script>alert(1)</script>![x](http://192.0.2.1/x.png)\u202e\x00"
    write(folder, "<b>~0", bad + "\n" + ours(1, bad, **{"<i>": bad}) + '{"event": 1}\n[1]\n{"a":\n')
    page = log_tail.render_log(await log_tail.Tail(folder).lines(""), SAY_ENGLISH)
    assert "<script" not in page
    assert "<i>" not in page
    assert "<b><b>" not in page
    assert not {"\x1b", "\x00", "\u202e"} & set(page)


async def test_a_gigabyte_without_a_newline_costs_its_end_alone(folder: Path) -> None:
    path = folder / "logs" / "m~0.log"
    with path.open("wb") as file:  # sparse
        file.seek(2**30)
        file.write(b"w" * 5000)
    write(folder, "n~0", "".join(ours(1, "x" * 900) for _ in range(5000)))
    began_s = time.monotonic()
    found = await log_tail.Tail(folder).lines("")
    assert time.monotonic() - began_s < 10
    assert len(found) <= log_tail.LINES
    assert len(log_tail.render_log(found, SAY_ENGLISH)) < 2 * log_tail.LINES * log_tail.LINE_CHARS


async def test_many_who_look_have_the_files_read_once_a_second(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "m~0", ours(1, "one"))
    reader, real, read = log_tail.Tail(folder), log_tail.read_log, list[str]()

    def counted(at: Path, name: str) -> list[LogLine]:
        read.append(name)
        return real(at, name)

    monkeypatch.setattr(log_tail, "read_log", counted)
    monkeypatch.setattr(log_tail, "AGAIN_S", 3600.0)
    for number in range(1000):
        await reader.lines("m")
        await reader.lines(str(number))
    assert read.count("m") <= 2 + 1000 // log_tail._CHOICES
    assert len(reader._kept) <= log_tail._CHOICES


async def test_without_a_folder_there_is_nothing(tmp_path: Path) -> None:
    for reader in (log_tail.Tail(None), log_tail.Tail(tmp_path)):
        assert await reader.names() == []
        assert "No log lines yet" in log_tail.render_log(await reader.lines(""), SAY_ENGLISH)
