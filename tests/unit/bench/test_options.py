"""What the command line asks for, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servekit.bench import options
from servekit.bench.client.client_protocol import Target
from servekit.bench.options import Load, Options, share_of
from servekit.errors import ConfigError


def target(url: str, **changes: Any) -> Target:
    fields: dict[str, Any] = {"key": None, "ca": None, "insecure": False, "environ": {}}
    return options.parse_target(url, **{**fields, **changes})


def asking(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "api": "chat",
        "model": "m",
        "stream": True,
        "prompt_tokens": None,
        "output_tokens": "16",
        "turns": "1",
        "shared_prefix_tokens": 0,
        "prefixes": 1,
        "ignore_eos": False,
        "extra": None,
        "dataset": None,
    }
    return options.make_asking(**{**fields, **changes})


def whole(**changes: Any) -> Options:
    fields: dict[str, Any] = {
        "target": target("127.0.0.1:8000"),
        "asking": asking(),
        "loads": (Load(users=8),),
        "requests": None,
        "duration_s": 5.0,
        "warmup": 1,
        "seed": 0,
        "timeout_s": 60.0,
        "processes": None,
        "slo": {},
    }
    return Options(**{**fields, **changes})


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://example.org/v1/", "http://example.org:80/v1"),
        ("https://example.org/openai/v1", "https://example.org:443/openai/v1"),
        ("https://example.org/openai", "https://example.org:443/openai/v1"),
        ("http://[::1]:8000/v1/chat/completions", "http://[::1]:8000/v1"),
    ],
)
def test_urls(url: str, found: str) -> None:
    assert target(url).url == found


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.org", "write http"),
        ("http://", "write http"),
        ("http://a:notaport", "not a URL"),
        ("http://a:1/b c", "characters"),
        ("http://a:1/\u00e9", "characters"),
        ("http://me:secret@example.org", "password"),
    ],
)
def test_what_is_no_url(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        target(url)


def test_the_key_comes_from_the_environment() -> None:
    both = {"SERVEKIT_API_KEY": "ours", "OPENAI_API_KEY": "theirs", "MINE": "mine"}
    assert target("a:1").key is None
    assert target("a:1", environ=both).key == "ours"
    assert target("a:1", environ={"OPENAI_API_KEY": "theirs"}).key == "theirs"
    assert target("a:1", environ=both, key="MINE").key == "mine"


def test_a_key_on_the_command_line_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="name of an environment variable") as error:
        target("a:1", key="sk-very-secret")
    assert "sk-very-secret" not in error.value.message
    with pytest.raises(ConfigError, match="characters"):
        target("a:1", key="BAD", environ={"BAD": "a\r\nhost: b"})
    with pytest.raises(ConfigError, match="the key in SERVEKIT_API_KEY has characters"):
        target("a:1", environ={"SERVEKIT_API_KEY": "sk-mine\n"})


def test_an_authority_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        target("https://a:1", ca=tmp_path / "none.pem")


@pytest.mark.parametrize(
    ("concurrency", "rate", "found"),
    [
        (None, None, (Load(users=8),)),
        ("1,8, 64", None, (Load(users=1), Load(users=8), Load(users=64))),
        (None, "0.5,10", (Load(rate=0.5), Load(rate=10.0))),
    ],
)
def test_loads(concurrency: str | None, rate: str | None, found: tuple[Load, ...]) -> None:
    assert options.parse_loads(concurrency, rate) == found


@pytest.mark.parametrize(
    ("concurrency", "rate", "words"),
    [
        ("1", "1", "not both"),
        ("0", None, "--concurrency '0'"),
        ("1,,2", None, "whole numbers"),
        ("many", None, "whole numbers"),
        (None, "0", "--rate '0'"),
        (None, "nan", "above 0"),
        (None, "inf", "above 0"),
        (None, "fast", "above 0"),
    ],
)
def test_no_loads(concurrency: str | None, rate: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options.parse_loads(concurrency, rate)


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, None), ("30", 30), ("30s", 30), ("1.5m", 90), ("1h", 3600)]
)
def test_durations(text: str | None, seconds: float | None) -> None:
    assert options.parse_run_time(text) == seconds


@pytest.mark.parametrize("text", ["0", "soon", "-1s", "1w", "9999h"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ConfigError, match="--duration"):
        options.parse_run_time(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"api": "images"}, "chat, completions or embeddings"),
        ({"api": "embeddings", "turns": "2"}, "no conversations"),
        ({"extra": "[1]"}, "not a JSON object"),
        ({"extra": "{oops"}, "not a JSON object"),
        ({"output_tokens": "0"}, "--output-tokens"),
        ({"turns": "x"}, "--turns"),
    ],
)
def test_what_cannot_be_asked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asking(**changes)


def test_a_dataset_has_the_prompts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}')
    assert asking(dataset=file).dataset == str(file)
    for changes in ({"prompt_tokens": "5"}, {"shared_prefix_tokens": 5}, {"turns": "2"}):
        with pytest.raises(ConfigError, match="--dataset"):
            asking(dataset=file, **changes)


def test_embeddings_are_not_streamed() -> None:
    assert asking(api="embeddings").stream is False


def test_the_parts_of_the_processes_make_the_whole() -> None:
    told = whole(loads=(Load(users=10),), requests=103, warmup=5, processes=4)
    orders = list(told.orders(told.loads[0], told.asking))
    assert [order.users for order in orders] == [3, 3, 2, 2]
    assert [order.requests for order in orders] == [26, 26, 26, 25]
    assert [order.warmup for order in orders] == [2, 1, 1, 1]
    assert [(order.index, order.clients) for order in orders] == [(n, 4) for n in range(4)]
    rates = [order.rate for order in told.orders(Load(rate=10.0), told.asking)]
    assert rates == [2.5] * 4


def test_processes_are_by_need() -> None:
    assert whole().processes_of(Load(users=8)) == 1
    assert whole().processes_of(Load(rate=5.0)) == 1
    assert whole(processes=16).processes_of(Load(users=3)) == 3, "none without a user"
    assert whole(processes=16, requests=2).processes_of(Load(rate=9.0)) == 2
    assert whole().processes_of(Load(users=100_000)) >= 1


def test_shares_differ_by_one_at_most() -> None:
    assert [share_of(7, 3, index) for index in range(3)] == [3, 2, 2]
