"""The ledger of usage: days and months, the file, and budgets."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from servekit.config.sections.access import KeyConfig
from servekit.protocol.control.metrics_messages import Series
from servekit.supervisor import usage_ledger
from servekit.supervisor.usage_ledger import UsageLedger
from servekit.usage_store import FILE, read_usage
from tests.polling import poll


class Clock:
    def __init__(self) -> None:
        self.at = datetime(2026, 11, 29, 23, 59)

    def __call__(self) -> datetime:
        return self.at


def count(ledger: UsageLedger, key: str, prompt: int, completion: int = 0) -> None:
    who = ("m", "", key)
    ledger.add(
        [
            Series("servekit_requests_total", (*who, "200", "stop"), [1]),
            Series("servekit_prompt_tokens_total", who, [prompt]),
            Series("servekit_completion_tokens_total", who, [completion]),
            Series("servekit_queue_wait_seconds", ("m",), [1]),
        ]
    )


def key(name: str, **limits: int) -> KeyConfig:
    return KeyConfig(name=name, environment="X", **limits)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_sums_are_by_day_and_month(tmp_path: Path, clock: Clock) -> None:
    for day, tokens in ((29, 1), (30, 2)):
        ledger = UsageLedger(clock)
        clock.at = datetime(2026, 11, day)
        ledger.open_store(tmp_path)
        count(ledger, "k", tokens)
        count(ledger, "other", 10)
        ledger.close()
    rows = read_usage(tmp_path, by=("key",))
    found = [(row.period, row.key, row.prompt_tokens) for row in rows]
    assert found == [
        ("2026-11-29", "k", 1),
        ("2026-11-29", "other", 10),
        ("2026-11-30", "k", 2),
        ("2026-11-30", "other", 10),
    ]
    models = read_usage(tmp_path, by=("model",), since="2026-11-30")
    assert [(row.key, row.model, row.requests) for row in models] == [("", "m", 2)]
    (month,) = read_usage(tmp_path, by=(), monthly=True)
    assert (month.period, month.key, month.requests, month.prompt_tokens) == ("2026-11", "", 4, 23)


def test_budgets_are_renewed_with_the_day_and_the_month(tmp_path: Path, clock: Clock) -> None:
    ledger = UsageLedger(clock)
    ledger.open_store(tmp_path)
    keys = [key("d", daily_tokens=10), key("m", monthly_tokens=10), key("free")]
    for one in keys:
        count(ledger, one.name, 5, 5)
    first = {one.name: one for one in ledger.find_spent(keys).spent}
    assert set(first) == {"d", "m"}
    assert datetime.fromtimestamp(first["d"].resets_at) == datetime(2026, 11, 30)
    assert datetime.fromtimestamp(first["m"].resets_at) == datetime(2026, 12, 1)
    clock.at = datetime(2026, 11, 30)
    assert [one.name for one in ledger.find_spent(keys).spent] == ["m"]
    clock.at = datetime(2026, 12, 1)
    assert not ledger.find_spent(keys).spent
    ledger.close()


def test_a_restart_reads_what_is_used(tmp_path: Path, clock: Clock) -> None:
    keys = [key("d", daily_tokens=10), key("m", monthly_tokens=11)]
    for at in (datetime(2026, 11, 2), datetime(2026, 11, 3)):
        clock.at = at
        ledger = UsageLedger(clock)
        ledger.open_store(tmp_path)
        for one in keys:
            count(ledger, one.name, 6)
        ledger.close()
    again = UsageLedger(clock)
    again.open_store(tmp_path)
    assert [one.name for one in again.find_spent(keys).spent] == ["m"]
    again.close()


def test_a_clock_that_is_set_gives_no_budget_back(tmp_path: Path, clock: Clock) -> None:
    """As where the time comes from the network, after the start."""
    keys = [key("d", daily_tokens=10), key("m", monthly_tokens=10)]
    ledger = UsageLedger(clock)
    ledger.open_store(tmp_path)
    for one in keys:
        count(ledger, one.name, 5, 5)
    ledger.close()
    right, clock.at = clock.at, datetime(1970, 1, 1)
    ledger = UsageLedger(clock)
    ledger.open_store(tmp_path)
    assert ledger.find_spent(keys).spent == (), "of this month nothing is known"
    for at in (right, datetime(2030, 1, 1), right):
        clock.at = at
        spent = [one.name for one in ledger.find_spent(keys).spent]
        assert spent == (["d", "m"] if at == right else [])
    clock.at = datetime(2026, 11, 30)
    count(ledger, "d", 10)
    clock.at = datetime(2026, 11, 29)
    assert len(ledger.find_spent(keys).spent) == 2
    clock.at = datetime(2026, 11, 30)
    assert len(ledger.find_spent(keys).spent) == 2, "also what is not written yet counts"
    ledger.close()


def test_the_last_days_with_requests_are_kept_whatever_the_clock_says(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_ledger, "MOST_DAYS", 3)
    for year, month, day in ((2001, 1, 1), (2001, 1, 2), (2001, 1, 3), (2030, 1, 1)):
        clock.at = datetime(year, month, day)
        ledger = UsageLedger(clock)
        ledger.open_store(tmp_path)
        count(ledger, "k", 1)
        ledger.close()
    kept = [row.period for row in read_usage(tmp_path)]
    assert kept == ["2001-01-02", "2001-01-03", "2030-01-01"]


def test_the_writer_sleeps_until_there_is_something_to_write(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_ledger, "WRITE_EVERY_S", 0.001)
    ledger = UsageLedger(clock)
    looks: list[None] = []
    write = ledger._write

    def look(path: Path) -> None:
        write(path)
        looks.append(None)

    monkeypatch.setattr(ledger, "_write", look)
    ledger.open_store(tmp_path)
    try:
        count(ledger, "k", 1)
        poll("it is written", lambda: read_usage(tmp_path))
        count(ledger, "k", 1)
        poll("it is written", lambda: read_usage(tmp_path)[0].requests == 2)
        assert len(looks) <= 2
    finally:
        ledger.close()
    assert len(looks) <= 3  # and one at the end


def test_a_damaged_file_is_put_aside_and_nothing_is_lost(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database" * 100)
    ledger = UsageLedger(clock)
    ledger.open_store(tmp_path)
    count(ledger, "k", 3)
    ledger._write(tmp_path / FILE)
    ledger.close()
    assert (tmp_path / f"{FILE}.broken").exists()
    assert read_usage(tmp_path)[0].prompt_tokens == 3
