"""What the echo engine's prefix cache says it has."""

from __future__ import annotations

from servekit.engines.api.base import Job
from servekit.engines.echo.run import BLOCK, EchoCache
from servekit.protocol.messages import SamplingParams

IDS = list(range(10 * BLOCK))


def job(ids: list[int], adapter: str = "") -> Job:
    return Job(1, ids, SamplingParams(), adapter=adapter)


def test_whole_blocks_are_found_again_from_the_beginning_on() -> None:
    cache = EchoCache(1000, 0.5)
    assert cache.read_prompt(job(IDS)) == (0, 0.5 * len(IDS))
    assert cache.read_prompt(job([*IDS, 7])) == (len(IDS), 0.5)
    changed = [*IDS[: 3 * BLOCK + 5], -1, *IDS[3 * BLOCK + 6 :]]
    assert cache.read_prompt(job(changed))[0] == 3 * BLOCK
    assert cache.read_prompt(job(IDS[1:]))[0] == 0


def test_the_last_token_is_always_read() -> None:
    cache = EchoCache(1000, 0.0)
    for _ in range(2):
        found, _ = cache.read_prompt(job(IDS))
    assert found == len(IDS) - BLOCK


def test_adapters_share_nothing() -> None:
    cache = EchoCache(10_000, 0.0)
    assert [cache.read_prompt(job(IDS, name))[0] for name in ("", "a", "b", "")] == [
        0,
        0,
        0,
        9 * BLOCK,
    ]


def test_salts_share_nothing() -> None:
    cache, found = EchoCache(10_000, 0.0), []
    for salt in ("", "a", "b", "a"):
        one = job(IDS)
        one.cache_salt = salt
        found.append(cache.read_prompt(one)[0])
    assert found == [0, 0, 0, 9 * BLOCK]


def test_the_least_recently_used_is_forgotten() -> None:
    cache = EchoCache(2 * len(IDS), 0.0)
    others = [[start, *IDS] for start in (900, 901)]
    for ids in (IDS, others[0], IDS, others[1]):
        cache.read_prompt(job(ids))
    assert cache.read_prompt(job(IDS))[0] == 9 * BLOCK
    assert cache.read_prompt(job(others[0]))[0] == 0
