"""Some of what `python -m tests.fuzz` sends, each time the same: no 5xx, no loss of form."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import main


def test_no_request_is_answered_badly(capsys: pytest.CaptureFixture[str]) -> None:
    # so few are no measure of memory: what grows by half is a leak all the same
    code = main(["--requests", "2000", "--seed", "20261121", "--growth", "0.5"])
    assert code == 0, capsys.readouterr().out
