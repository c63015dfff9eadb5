"""Models that decode speculatively, killed in the midst: their text is the plain one's."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.instance import Instance
from tests.integration.test_generations import Asked
from tests.unit.engines.harness import write_tiny_llama

pytestmark = pytest.mark.timeout(180)
WAYS = ("ngram", "draft")
PROMPT = "one two three one two three one"
LENGTH = 400


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    small = write_tiny_llama(tmp_path_factory.mktemp("small"), hidden_size=32)
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram": {"speculative": {"method": "ngram", "ngram_min": 1}},
        "draft": {"speculative": {"method": "draft", "model": str(small)}},
    }
    models = [
        {
            "name": name,
            "engine": "transformers",
            "path": str(folder),
            "device": "cpu",
            "options": {"threads": 1, **options},
        }
        for name, options in asked.items()
    ]
    with Instance.up(tmp_path_factory.mktemp("up"), models) as one:
        one.until_settled()
        yield one


def complete(instance: Instance, model: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 60, "temperature": 0} | more
    told = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=60)
    assert told.status_code == 200, told.text
    found: dict[str, Any] = told.json()
    return found


def counts(instance: Instance, model: str) -> list[int]:
    """Proposed and accepted tokens, by /metrics."""
    page = httpx.get(f"{instance.url}/metrics", timeout=30).text
    names = ("draft_tokens", "accepted_tokens")
    labels = rf'{{model="{model}",worker="{model}/0"}} (\S+)'
    found = [re.search(f"servekit_spec_decode_num_{name}_total{labels}", page) for name in names]
    return [int(float(one[1])) for one in found if one]


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 3, "temperature": 0.8, "seed": 4},
        {"logprobs": 2},
        {"stop": ["e", "o"]},
        {"frequency_penalty": 1.2, "logit_bias": {"20": 4}},
        {"ignore_eos": True, "max_tokens": 7},
        {"prompt": ["one one one one", "two"], "echo": True},
        {"response_format": {"type": "json_object"}, "ignore_eos": True, "max_tokens": 50},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_answers_are_the_plain_ones(instance: Instance, asked: dict[str, Any]) -> None:
    expected = complete(instance, "plain", **asked)
    for way in WAYS:
        found = complete(instance, way, **asked)
        assert [_without_numbers(one) for one in found["choices"]] == [
            _without_numbers(one) for one in expected["choices"]
        ]
        spent = [one["usage"]["completion_tokens"] for one in (found, expected)]
        assert spent[0] == spent[1]


def _without_numbers(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without log probabilities, which differ in their last digits."""
    tokens = (choice.get("logprobs") or {}).get("tokens")
    return choice | {"logprobs": tokens}


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_outlives_its_worker(instance: Instance, way: str) -> None:
    long = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    expected = complete(instance, "plain", **long)["choices"][0]["text"]
    before = instance.replica(f"{way}/0")
    with ThreadPoolExecutor(8) as pool:
        streams = [
            Asked(pool, instance.url, "/v1/completions", model=way, stream=True, **long)
            for _ in range(8)
        ]
        assert streams[0].begun.wait(30)
        os.kill(before.pid, signal.SIGKILL)
        for one in streams:
            one.over.result(60)
            assert not one.error
            assert one.text == expected
    assert instance.replica(f"{way}/0").pid != before.pid
    assert instance.model(way).replicas[0].restarts > 0

    def told() -> bool:  # proposals that a busy moment made look slow are tried again later
        assert complete(instance, way, **long)["choices"][0]["text"] == expected
        found = counts(instance, way)
        return bool(found) and found[0] >= found[1] >= (way == "ngram")

    instance.until("the metrics tell of it", told)
    assert counts(instance, "plain") == []


def test_streams_that_are_left_take_nothing_with_them(instance: Instance) -> None:
    body = {"model": "ngram", "prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True}
    for _ in range(6):
        with httpx.stream(
            "POST", f"{instance.url}/v1/completions", json=body | {"stream": True}
        ) as answer:
            next(answer.iter_lines())
    expected = complete(instance, "plain")["choices"][0]["text"]
    assert complete(instance, "ngram")["choices"][0]["text"] == expected
    instance.until("nothing runs", lambda: instance.replica("ngram/0").running == 0)
