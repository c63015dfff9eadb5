"""Which tokens of one-time links a gateway asks the supervisor about."""

from __future__ import annotations

import pytest

from servekit.protocol.browser_link import is_genuine, make_token

SECRET = b"s" * 32


def test_a_token_is_known_by_its_secret_and_short_enough_for_a_line_of_80() -> None:
    token = make_token(SECRET)
    assert is_genuine(token, SECRET)
    assert not is_genuine(token, b"t" * 32)
    assert make_token(SECRET) != token
    assert len(f"│ http://127.0.0.1:65535/ui?token={token} │") <= 80


@pytest.mark.parametrize("at", range(32))
def test_a_changed_token_is_none(at: int) -> None:
    token = make_token(SECRET)
    other = "A" if token[at] != "A" else "B"
    assert not is_genuine(token[:at] + other + token[at + 1 :], SECRET)


@pytest.mark.parametrize("token", ["", "x", "x" * 32, "x" * 100_000, "é" * 32, "\0" * 32])
def test_what_nobody_made(token: str) -> None:
    assert not is_genuine(token, SECRET)
    assert not is_genuine(make_token(SECRET) + token, SECRET) or token == ""
