"""The table of states and events, one by one, and who hears of a change."""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

import pytest

from servekit.protocol.messages import WorkerState
from servekit.supervisor.lifecycle.managed_process import (
    TRANSITIONS,
    Event,
    ProcessEvent,
    StateChanged,
)
from tests.unit.supervisor.lifecycle.test_managed_process import Host, worker

#: The state after each event; a dash where the event is refused.
TABLE = """
             starting  loading   ready     asleep    stalled   draining  backoff   failed    stopped
start        starting  -         -         -         -         -         starting  starting  -
load         loading   -         -         -         -         -         -         -         -
serve        ready     ready     -         -         -         -         -         -         -
sleep        -         -         asleep    -         -         -         -         -         -
wake         -         -         -         ready     -         -         -         -         -
stall        stalled   stalled   stalled   stalled   -         -         -         -         -
lose-engine  stalled   stalled   stalled   stalled   stalled   -         -         -         -
drain        draining  draining  draining  draining  draining  -         -         -         -
back-off     backoff   backoff   backoff   backoff   backoff   -         backoff   backoff   -
fail         failed    failed    failed    failed    failed    -         failed    failed    -
retry        -         -         -         -         -         -         starting  starting  -
stop         stopped   stopped   stopped   stopped   stopped   stopped   stopped   stopped   -
"""
HEAD, *ROWS = (line.split() for line in TABLE.strip().splitlines())
STATES: tuple[WorkerState, ...] = get_args(WorkerState)
EVENTS: tuple[Event, ...] = get_args(Event)


def test_the_table_names_all_states_and_events() -> None:
    assert set(HEAD) == set(STATES)
    assert [row[0].replace("-", " ") for row in ROWS] == list(EVENTS)
    assert {state for state, _ in TRANSITIONS} <= set(STATES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
@pytest.mark.parametrize("state", STATES)
async def test_each_event_in_each_state(state: WorkerState, row: list[str], tmp_path: Path) -> None:
    event = next(one for one in EVENTS if one.replace(" ", "-") == row[0])
    after = row[1 + HEAD.index(state)]
    replica = worker(Host(tmp_path / "run"))
    heard: list[ProcessEvent] = []
    replica.listeners.append(heard.append)
    replica.state, replica.reason = state, "before"
    assert replica.accepts(event) is (after != "-")
    assert replica.change_state(event, "why") is (after != "-")
    if after == "-":
        assert (replica.state, replica.reason, heard) == (state, "before", [])
    else:
        assert (replica.state, replica.reason) == (after, "why")
        assert heard == [StateChanged(replica, state, cast(WorkerState, after))]
