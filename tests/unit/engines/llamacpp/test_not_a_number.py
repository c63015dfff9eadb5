"""A request whose logits are NaN fails alone; llama.cpp's shared cache would spread them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from servekit.engines.api.base import EmbedJob
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import Harness
from tests.unit.engines.origins import write_tiny_gguf

#: A token whose embedding is NaN: whoever reads it computes NaN from there on.
POISON = 200
IDS = [(7919 * at) % 190 for at in range(40)]
PROMPTS = [IDS[:20], [5, *IDS[:15]], IDS[7:40]]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", float32=True, tied=False)
    reader: Any = gguf.GGUFReader(path, "r+")
    [embedding] = [one for one in reader.tensors if one.name == "token_embd.weight"]
    embedding.data[POISON] = np.nan
    return path


@pytest.fixture
def make(poisoned: Path) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make_one(**options: Any) -> Harness:
        made.append(llamacpp(poisoned, options))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def failure(engine: Harness, job: int) -> None:
    """Expect a job's only output, an error that names NaN."""
    engine.until(lambda: engine.ended(job), "the bad one ends")
    [only] = engine.outputs[job]
    assert only.error is not None and "not numbers (NaN)" in only.error
    assert only.token_ids == [] and only.param is None


def expected_texts(engine: Harness, **params: Any) -> list[list[int]]:
    return [engine.generate(ids, **params) for ids in PROMPTS]


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 1.0, "seed": 3}, {"logprobs": 2}, {"prompt_logprobs": 1}]
)
def test_it_fails_alone(make: Callable[..., Harness], flash: str, asked: dict[str, Any]) -> None:
    params: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logit_bias": ((POISON, -99),)}
    expected = expected_texts(make(flash_attention=flash), **params)
    one = make(flash_attention=flash, batch_tokens=16)  # its prompt takes several passes
    for _ in range(2):
        beside = [one.submit(ids, **params) for ids in PROMPTS]
        bad = one.submit([*IDS, POISON, *IDS], max_tokens=8, ignore_eos=True, **asked)
        failure(one, bad)
        assert [one.tokens(job) for job in beside] == expected
    one.until_idle()
    assert (one.engine._runner.running, one.engine._runner.waiting) == (0, 0)


def test_two_bad_ones_and_one_that_leaves(make: Callable[..., Harness]) -> None:
    params: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logit_bias": ((POISON, -99),)}
    expected = expected_texts(make(flash_attention="off"), **params)
    one = make(flash_attention="off", batch_tokens=16)
    beside = [one.submit(ids, **params) for ids in PROMPTS]
    bad = [one.submit([*IDS[:at], POISON, *IDS], max_tokens=8) for at in (3, 30)]
    gone = one.submit([POISON, *IDS, *IDS], max_tokens=8)
    one.engine.cancel(gone)
    for job in bad:
        failure(one, job)
    assert [one.tokens(job) for job in beside] == expected
    assert one.outputs.get(gone, []) == []


def test_nobody_finds_its_prefix_in_the_cache(make: Callable[..., Harness]) -> None:
    """Tokens of one pass attend to each other with weight 0: those before it are NaN, too."""
    params: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logit_bias": ((POISON, -99),)}
    expected = make(flash_attention="off").generate([*IDS[:33], 6], **params)
    one = make(flash_attention="off")
    for _ in range(2):
        failure(one, one.submit([*IDS, POISON, *IDS]))
        assert one.generate([*IDS[:33], 6], **params) == expected
    again = one.submit([*IDS[:33], 6], **params)
    assert one.tokens(again) == expected
    assert one.outputs[again][0].cached_tokens == 33


def test_a_text_to_embed_fails_alone(make: Callable[..., Harness]) -> None:
    one = make(flash_attention="off", pooling="mean")
    one.engine.embed(EmbedJob(1, PROMPTS))
    one.until(lambda: one.ended(1), "the vectors are there")
    for number in range(2, 10, 2):
        one.engine.embed(EmbedJob(number, [[*IDS[:9], POISON]]))
        one.engine.embed(EmbedJob(number + 1, PROMPTS))
        one.until(lambda last=number + 1: one.ended(last), "both end")  # type: ignore[misc]
        failure(one, number)
        [beside], [alone] = one.outputs[number + 1], one.outputs[1]
        assert beside.error is None and len(beside.vectors or []) == len(PROMPTS)
        for found, known in zip(beside.vectors or [], alone.vectors or [], strict=True):
            difference = np.frombuffer(found, "<f4") - np.frombuffer(known, "<f4")
            assert np.abs(difference).max() < 1e-4
