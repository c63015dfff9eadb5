"""Which experiments run, what their findings say, and whom they may hurt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from servekit.chaos.baseline_answers import Tally
from servekit.chaos.command import findings_markdown, table_cells
from servekit.chaos.result import Judge, measure_slowness
from servekit.chaos.run import EXPERIMENTS, LAST, RunOptions
from servekit.chaos.target import describe_lacking, is_same_address, is_whole
from servekit.errors import ConfigError
from servekit.protocol.messages import (
    GatewayStatus,
    ModelStatus,
    ReplicaStatus,
    Status,
    WorkerState,
)


def status(state: WorkerState = "ready") -> Status:
    replica = ReplicaStatus("m/0", state, "", 11, "cpu")
    model = ModelStatus("m", "echo", "none", 0, (replica,))
    gateway = GatewayStatus("gateway/0", 12, "ready")
    return Status("0", 10, "http://127.0.0.1:1", "f", 0.0, 0, (model,), (gateway,), False)


def test_the_supervisor_is_killed_last_and_only_if_asked() -> None:
    assert LAST not in RunOptions().experiments()
    assert list(RunOptions(kill_supervisor=True).experiments()) == list(EXPERIMENTS)
    assert list(EXPERIMENTS)[-1] == LAST
    with pytest.raises(ConfigError, match="--kill-supervisor"):
        RunOptions(only=[LAST]).experiments()


def test_a_wrong_name_is_told_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"'worker-kiled'.*worker-killed, "):
        RunOptions(only=["worker-kiled"]).experiments()


def test_those_that_are_named_run_in_their_order() -> None:
    assert list(RunOptions(only=["flood", "worker-killed"]).experiments()) == [
        "worker-killed",
        "flood",
    ]


def test_a_broken_promise_breaks_the_finding() -> None:
    judge = Judge("x", "y", slowness=1.0)
    judge.expect_within("back", 1.0, 2.0)
    assert judge.finding().verdict == "kept"
    judge.expect_within("back", None, 2.0)
    assert judge.finding().verdict == "broken"
    assert judge.finding().detail == "back: never, promised within 2 s"


def test_no_answer_at_all_is_no_kept_promise() -> None:
    judge = Judge("x", "y", slowness=1.0)
    judge.clean(Tally())
    assert judge.finding().verdict == "broken"


def test_texts_that_are_not_checked_are_told() -> None:
    judge = Judge("x", "y", slowness=1.0)
    judge.clean(Tally(sent=3, answered=3, unsure=2))
    assert judge.finding().detail.startswith("the text of 2 answers was not checked: ")


def test_a_late_deed_is_broken() -> None:
    judge = Judge("x", "y", slowness=1.0)
    judge.expect_within("back", 2.5, 2.0)
    assert judge.broken == ["back: 2.50 s, promised within 2 s"]


def test_a_busy_machine_gets_more_time() -> None:
    judge = Judge("x", "y", slowness=2.0)
    judge.expect_within("back", 7.9, 2.0)
    assert not judge.broken
    judge.expect_within("back", 8.1, 2.0)
    assert judge.broken == ["back: 8.10 s, promised within 2 s on a machine 2.0 times as slow"]


def test_how_busy_the_machine_is() -> None:
    assert 1.0 <= measure_slowness() < 1000


def test_whole_means_all_ready_and_the_victim_replaced() -> None:
    assert is_whole(status())
    assert not is_whole(status(), without=11)
    assert not is_whole(status(), without=12)
    assert not is_whole(status("loading"))


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000/", True),
        ("http://127.0.0.1:8001", False),
        ("http://10.0.0.7:8000", False),
        ("http://127.0.0.1", False),
    ],
)
def test_the_url_must_be_the_instances(asked: str, same: bool) -> None:
    assert is_same_address(asked, "http://127.0.0.1:8000") is same


def test_findings_are_readable() -> None:
    finding = Judge("x", "a|b").skip("why")
    assert table_cells(finding)[-2:] == ["skipped", "why"]
    assert "a\\|b" in findings_markdown([finding])


def test_what_does_not_serve_is_named_with_its_reason() -> None:
    assert describe_lacking(status()) == ""
    found = status("failed")
    [model] = found.models
    ill = replace(model.replicas[0], reason="no such folder")
    found = replace(found, models=(replace(model, replicas=(ill,)),))
    assert describe_lacking(found) == "m/0 is failed: no such folder"
