"""The attacks of `python -m tests.attacks`, one by one, as a lane."""

from __future__ import annotations

import pytest

from tests.attacks.__main__ import ATTACKS, carry_out
from tests.attacks.scene import Attack


@pytest.mark.lane("attacks")
@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_every_promise_holds_under_attack(attack: Attack) -> None:
    account = carry_out(attack)
    assert account.clean, account
