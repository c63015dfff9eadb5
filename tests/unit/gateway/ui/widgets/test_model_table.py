"""The table of Operate: its buttons say what the supervisor would refuse, and why."""

from __future__ import annotations

import re
from typing import Any

import pytest

from servekit.gateway.ui.pages.language import SAY_ENGLISH, Say
from servekit.gateway.ui.widgets.model_table import (
    ACTS,
    explain_refusal,
    find_tier,
    render_models,
)
from servekit.protocol.messages import ModelInfo, ModelStatus, Progress, ReplicaStatus
from servekit.protocol.residency import ResidencyStatus

SLEEPS = ModelInfo(64, 1, True, "echo", "none", "cpu", sleeps=True)


def replica(state: Any = "ready", name: str = "m/0", **fields: Any) -> ReplicaStatus:
    return ReplicaStatus(name, state, "/nowhere.sock", 1, "cpu", **fields)


def model(*replicas: ReplicaStatus, tier: Any = None, **fields: Any) -> ModelStatus:
    residence = None if tier is None else ResidencyStatus("manual", tier, fields.pop("why", ""))
    fields = {"info": SLEEPS, "residence": residence} | fields
    return ModelStatus("m", "echo", "-", 0, replicas, **fields)


def allowed(one: ModelStatus) -> list[str]:
    return [act for act in ACTS if not explain_refusal(one, act, SAY_ENGLISH)]


@pytest.mark.parametrize(
    ("one", "acts"),
    [
        (model(replica()), ["unload", "sleep", "restart"]),
        (model(replica(), tier="resident"), ["unload", "sleep", "restart"]),
        (model(replica(), changing=True), ["unload", "sleep"]),
        (model(tier="stopped"), ["load"]),
        (model(tier="stopped", left_out="coding"), []),
        (model(replica(), tier="resident", left_out="coding"), ["unload", "sleep", "restart"]),
        (model(replica("asleep"), tier="asleep"), ["load", "unload", "wake", "restart"]),
        (model(replica("loading"), tier="coming"), ["unload", "restart"]),
        (model(replica("draining"), tier="leaving"), ["load"]),
        (model(replica("failed"), tier="failed"), ["load", "unload", "restart"]),
        (model(replica("failed")), ["load", "unload", "restart"]),
    ],
)
def test_a_button_is_enabled_where_it_is_of_use(one: ModelStatus, acts: list[str]) -> None:
    assert allowed(one) == acts


def test_the_reason_is_the_tooltip() -> None:
    restless = model(replica(), info=ModelInfo(64, 1, True, "echo", "none", "cpu"))
    html = render_models([restless], {}, "m", "", SAY_ENGLISH)
    assert buttons(html)["Sleep m"].endswith("the file gives it no idle_sleep_s.")
    assert buttons(html)["Load m"] == "Not possible now: it is loaded."
    assert buttons(html)["Unload m"] == ""
    closed = render_models([restless], {}, "m", "Read-only.", SAY_ENGLISH)
    assert set(buttons(closed).values()) == {"Read-only."}


def buttons(html: str) -> dict[str, str]:
    """Return the tooltip of each button that acts, "" for one that is enabled."""
    found = re.findall(r'aria-label="([^"]+)"(?: aria-disabled="true" title="([^"]*)")?>', html)
    return {name: why for name, why in found if name != "Models"}


def test_a_row_says_what_a_model_does() -> None:
    busy = model(replica(running=2), replica(name="m/1", running=1, rss_bytes=2**30))
    html = render_models([busy], {"m": 4}, "m", "", SAY_ENGLISH)
    assert "3 running, 4 waiting" in html
    assert "1.0 GiB" in html
    assert buttons(html)["Restart m/1"] == ""
    assert html.count("<tr") == 4  # the heads, the model and its two workers
    loading = model(replica("loading", progress=Progress("weights", 3, 10)))
    assert find_tier(loading) == "coming"
    assert find_tier(model()) == "coming"  # it has just come back
    assert "weights, 30 %" in render_models([loading], {}, "", "", SAY_ENGLISH)
    away = render_models([model(tier="stopped", why="stopped at 1: idle")], {}, "", "", Say("zh"))
    assert "1 停止：idle" in away and "已停止" in away


def test_what_workers_say_is_text() -> None:
    bad = "\x1b[2J<script>x</script>\u202e" + "w" * 10_000
    one = model(replica("failed", reason=bad), tier="failed", why=bad)
    html = render_models([one], {}, "m", "", SAY_ENGLISH)
    assert "<script" not in html and "\x1b" not in html and "\u202e" not in html
    assert len(html) < 5000
