"""Orders to sleep and to wake, and what is made of their failures; vLLM itself is not needed."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engines.vllm.sleep import Broken, SleepControl
from servekit.errors import LoadError
from tests.unit.engines.vllm.recording import RecordingCore

ROOM = ("collective_rpc", "lacking_bytes", None, (), None)


def slumber(level: int, lacking: list[int], fails: str = "") -> tuple[SleepControl, RecordingCore]:
    def answer(*told: Any) -> Any:
        if told == ROOM:
            return lacking
        if fails in (told[0], told[1]):
            raise RuntimeError("CUDA Error: out of memory")
        return None

    core = RecordingCore(answer)
    taken: Any = core
    return SleepControl(taken, level, lambda: core.calls.append(("restored",))), core


def test_room_is_looked_for_before_anything_is_woken() -> None:
    made, core = slumber(1, [0])
    made.wake()
    assert core.calls == [ROOM, ("wake_up", None)]


def test_of_level_2_the_weights_are_read_and_the_rest_is_given_back() -> None:
    made, core = slumber(2, [0])
    made.wake()
    assert [told[1] for told in core.calls[1:4]] == [["weights"], "reload_weights", ["kv_cache"]]
    assert core.calls[4] == ("restored",)


@pytest.mark.parametrize("level", [1, 2])
def test_where_one_gpu_has_no_room_it_sleeps_on(level: int) -> None:
    made, core = slumber(level, [0, 3 * 2**30])
    with pytest.raises(LoadError, match=r"3\.0 GiB too little") as told:
        made.wake()
    assert not isinstance(told.value, Broken) and not told.value.permanent
    assert core.calls == [ROOM]


@pytest.mark.parametrize(("level", "fails"), [(1, "wake_up"), (2, "reload_weights")])
def test_what_is_half_awake_is_broken(level: int, fails: str) -> None:
    made, _ = slumber(level, [0], fails)
    with pytest.raises(Broken, match="could not wake up, and is being restarted: CUDA Error"):
        made.wake()


def test_what_is_half_asleep_is_broken() -> None:
    made, core = slumber(1, [0], "sleep")
    with pytest.raises(Broken, match="could not go to sleep"):
        made.sleep()
    assert core.calls == [("sleep", 1)]
