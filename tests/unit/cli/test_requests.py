"""`servekit requests` in windows of all widths."""

from __future__ import annotations

import dataclasses

import pytest

from servekit.cli.requests import choose_columns, format_record
from servekit.request_log import RequestRecord

RECORD = RequestRecord(
    at=1.0,
    id="3bee1416a170-000002",
    model="smollm2-135m-instruct",
    endpoint="/v1/chat/completions",
    status=200,
    outcome="stop",
    total_s=2.6,
)
ALWAYS = {"TIME", "STATUS", "MODEL", "ENDPOINT", "OUTPUT", "TOTAL"}


@pytest.mark.parametrize("width", [80, 90, 100, 120, 140, 160])
def test_a_line_fits_its_window(width: int) -> None:
    columns = choose_columns(width, [RECORD])
    assert len(format_record(RECORD, columns)) <= width
    assert {one.head for one in columns} >= ALWAYS


def test_a_wide_window_has_all_columns_and_a_narrow_one_the_clock() -> None:
    everything = choose_columns(None)
    assert choose_columns(200) == everything
    assert format_record(RECORD, everything).endswith("stop      3bee1416a170-000002")
    assert [one.width for one in choose_columns(90) if one.head == "TIME"] == [8]


def test_names_longer_than_usual_widen_their_column() -> None:
    named = dataclasses.replace(RECORD, model="m" * 40)
    [model] = [one for one in choose_columns(None, [RECORD, named]) if one.head == "MODEL"]
    assert model.width == 40
    hostile = dataclasses.replace(RECORD, endpoint="/" + "x" * 60_000)
    assert max(one.width for one in choose_columns(None, [hostile])) == 40
