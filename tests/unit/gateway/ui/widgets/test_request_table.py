"""The table of the last requests: what the filters show, and that it is bounded and data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.gateway.ui.pages.language import SAY_ENGLISH
from servekit.gateway.ui.widgets import request_table
from servekit.gateway.ui.widgets.request_table import (
    FAILED,
    RecentRequests,
    RequestFilter,
    find_choices,
    render_requests,
)
from servekit.request_log import RequestRecord, file_of


def record(number: int, status: int = 200, total_s: float = 0.5, **fields: object) -> RequestRecord:
    given = {"key": "alice", "model": "m", "outcome": "stop"} | fields
    return RequestRecord(1000.0 + number, f"r-{number}", "/v1/x", status, total_s, **given)  # type: ignore[arg-type]


RECORDS = [
    record(5, total_s=7.0, cached_tokens=1024, prompt_tokens=2048, completion_tokens=9),
    record(4, 499, outcome="cancelled"),
    record(3, 400, model="", outcome="", key="bob"),
    record(2, outcome="internal_error", model="n"),
    record(1, key=""),
]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        (RequestFilter(), [5, 4, 3, 2, 1]),
        (RequestFilter(model="m"), [5, 4, 1]),
        (RequestFilter(key="alice"), [5, 4, 2]),
        (RequestFilter(status="200"), [5, 2, 1]),
        (RequestFilter(status=FAILED), [4, 3, 2]),  # also one that failed after its 200
        (RequestFilter(slow_s=5.0), [5]),
        (RequestFilter(model="m", key="alice", status=FAILED), [4]),
        (RequestFilter(model="none"), []),
    ],
)
def test_filters_are_met_together(wanted: RequestFilter, numbers: list[int]) -> None:
    html = render_requests(RECORDS, wanted, SAY_ENGLISH)
    shown = [one for one in (5, 4, 3, 2, 1) if f"r-{one}<" in html]
    assert shown == numbers
    assert sorted(numbers, key=lambda one: html.index(f"r-{one}<")) == numbers  # newest first
    assert ("No request fits" in html) is (not numbers)


def test_a_row_says_what_the_command_says() -> None:
    html = render_requests(RECORDS[:1], RequestFilter(), SAY_ENGLISH)
    assert ">1970-01-01 00:16:45</th>" in html  # it is not of today
    assert "2,048 (1,024) → 9" in html
    assert "7 s" in html
    assert "The last 1 of 1 since 1970-01-01 00:16:45 UTC" in html


def test_choices_are_what_was_seen() -> None:
    found = find_choices(RECORDS)
    assert (found.models, found.keys) == (("m", "n"), ("alice", "bob"))
    assert found.statuses == ("200", "400", "499")


def test_it_is_bounded_whatever_clients_say() -> None:
    many = [record(number, model=f"m{number}" * 500) for number in range(5000)]
    html = render_requests(many, RequestFilter(), SAY_ENGLISH)
    assert html.count("<tr>") == 1 + request_table.SHOWN
    assert len(html) < request_table.SHOWN * 3000
    assert "The last 100 of 5,000" in html
    assert len(find_choices(many).models) == request_table.CHOICES


def test_what_clients_say_is_data() -> None:
    bad = "\x1b[2J<script>alert(1)</script>\u202e\x00"
    html = render_requests(
        [record(1, model=bad, key=bad, outcome=bad)], RequestFilter(), SAY_ENGLISH
    )
    assert "<script" not in html
    assert not {"\x1b", "\x00", "\u202e"} & set(html)


def test_nothing_yet() -> None:
    assert "No request yet" in render_requests([], RequestFilter(model="m"), SAY_ENGLISH)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose files are read; RECORDS are in each."""
    read: list[Path] = []

    def counted(folder: Path, most_bytes: int) -> list[RequestRecord]:
        read.append(folder)
        return RECORDS

    monkeypatch.setattr(request_table, "read_latest", counted)
    return read


async def test_many_who_look_have_the_files_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    monkeypatch.setattr(request_table, "AGAIN_S", 3600.0)
    recent = RecentRequests(tmp_path)
    for _ in range(100):
        assert await recent.records() == RECORDS
    assert reads == [tmp_path]
    assert await RecentRequests(None).records() == []  # a gateway on another machine


async def test_files_that_have_not_changed_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    monkeypatch.setattr(request_table, "AGAIN_S", 0.0)
    path = file_of(tmp_path, "gateway/0")
    path.parent.mkdir()
    recent = RecentRequests(tmp_path)
    for number in range(3):
        path.write_bytes(b"[]\n")
        os.utime(path, ns=(number, number))
        for _ in range(5):
            assert await recent.records() == RECORDS
        assert len(reads) == number + 1
