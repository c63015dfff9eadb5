"""The range of replicas of a model that scales."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from servekit.config.sections.scale import MOST, ReplicaRange, ScaleConfig


def test_a_range_has_one_replica_at_least_while_the_model_is_loaded() -> None:
    one = ReplicaRange(min=0, max=3)
    assert one.least == 1
    assert [one.clamp(count) for count in (0, 1, 2, 3, 4)] == [1, 1, 2, 3, 3]
    two = ReplicaRange(min=2, max=2)
    assert (two.least, two.clamp(0), two.clamp(9)) == (2, 2, 2)
    assert ReplicaRange(max=3).min == 1


@pytest.mark.parametrize(
    "keys",
    [{"min": 3, "max": 2}, {"min": -1, "max": 2}, {"min": 0, "max": 0}, {"max": MOST + 1}, {}],
)
def test_what_is_no_range_is_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        ReplicaRange.model_validate(keys)


@pytest.mark.parametrize(
    "keys", [{"wait_s": 0}, {"kv_used": 0}, {"kv_used": 1.1}, {"down_s": 0}, {"up_s": 1}]
)
def test_thresholds_that_never_or_always_hold_are_refused(keys: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ScaleConfig.model_validate(keys)


def test_a_share_of_one_is_a_threshold() -> None:
    assert ScaleConfig(kv_used=1).kv_used == 1
