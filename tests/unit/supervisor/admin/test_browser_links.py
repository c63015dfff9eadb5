"""A one-time link opens once, for some minutes, and few of them wait."""

from __future__ import annotations

from servekit.protocol.browser_link import make_token
from servekit.supervisor.admin.browser_links import LINK_LIFE_S, MOST_LINKS, BrowserLinks

SECRET = b"s" * 32


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_token_is_taken_once() -> None:
    links = BrowserLinks(SECRET)
    one, other = links.create(), links.create()
    assert links.redeem(one)
    assert not links.redeem(one)
    assert links.redeem(other)
    for stranger in ("", "é", one[:-1], make_token(SECRET)):  # the last is genuine, but not ours
        assert not links.redeem(stranger)


def test_a_token_expires() -> None:
    clock = Clock()
    links = BrowserLinks(SECRET, clock)
    early, late = links.create(), links.create()
    clock.now_s += LINK_LIFE_S - 1
    assert links.redeem(early)
    clock.now_s += 1
    assert not links.redeem(late)


def test_the_oldest_makes_room() -> None:
    links = BrowserLinks(SECRET)
    made = [links.create() for _ in range(MOST_LINKS + 2)]
    assert [links.redeem(token) for token in made] == [False] * 2 + [True] * MOST_LINKS
