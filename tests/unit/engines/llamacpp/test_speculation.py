"""Proposed tokens in llama.cpp: the texts are those without, whatever is proposed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from servekit.engines.api import speculation
from servekit.engines.api.speculation import Proposer, Wanted
from servekit.engines.llamacpp import speculation_setup
from servekit.engines.llamacpp.draft_model import DraftProposer
from servekit.engines.llamacpp.model import Model
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.llamacpp.speculation_setup import estimate_worth
from servekit.errors import LoadError
from servekit.protocol.messages import Grammar
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import Harness
from tests.unit.engines.origins import write_tiny_gguf

Make = Callable[..., Harness]
NGRAM: dict[str, Any] = {"speculative": {"method": "ngram", "tokens": 6, "ngram_min": 1}}
SCHEMA = Grammar("json_schema", json.dumps({"type": "object"}))
ASKED: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 1.1, "top_p": 0.9, "top_k": 30, "seed": 5},
    {"logprobs": 2, "ignore_eos": True},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "ignore_eos": True},
    {"grammar": SCHEMA, "ignore_eos": True},
    {"logit_bias": ((40, 100.0), (41, 100.0)), "min_tokens": 9},
    {"prompt_logprobs": 1},
    {"max_tokens": 1},
]
estimate = estimate_worth


@pytest.fixture(autouse=True)
def all_that_is_found_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals of tiny models never pay."""
    monkeypatch.setattr(
        speculation.Speculator, "_rates_of", lambda self, rows: speculation.StepRates(1, rest=0)
    )
    monkeypatch.setattr(speculation_setup, "estimate_worth", lambda tokens, ratio: 1e9)


class Seer(Proposer[LlamaRow]):
    """A proposer that knows what will be said, by the prompt, and is wrong with some of it."""

    def __init__(self, known: dict[tuple[int, ...], list[int]], wrong: float, bad: int = 8) -> None:
        self._known, self._wrong, self._bad = known, wrong, bad
        self._made = random.Random(7)
        self.running: set[str] = set()

    def propose(self, wanted: Wanted[LlamaRow]) -> dict[str, list[int]]:
        self.running |= set(wanted)
        found = {}
        for key, (row, most) in wanted.items():
            said = self._known[tuple(row.job.prompt_ids)][row.position :][:most]
            said = [self._bad if self._made.random() < self._wrong else token for token in said]
            said += [9] * (most - len(said))  # beyond the end
            found[key] = said[: self._made.randint(1, most)]
        return found

    def forget(self, key: str) -> None:
        self.running.discard(key)


def prompts(count: int) -> list[list[int]]:
    drawn = random.Random(5)
    return [[drawn.randrange(3, 250) for _ in range(drawn.randrange(1, 60))] for _ in range(count)]


def run_crowd(harness: Harness, asked: list[dict[str, Any]] = ASKED) -> list[Any]:
    """Run a request of each sort; return tokens, end, and the scored tokens."""
    jobs = [
        harness.submit(prompt, **{"max_tokens": 40} | how)
        for prompt, how in zip(prompts(len(asked)), asked, strict=True)
    ]
    found = []
    for job in jobs:
        tokens = harness.tokens(job)
        scored = [(one.token, round(one.logprob, 2)) for one in harness.logprobs(job)]
        told = [output.prompt for output in harness.outputs[job] if output.prompt]
        found.append((tokens, harness.finish(job), scored, len(told)))
    return found


def use_seer(harness: Harness, expected: list[Any], wrong: float, bad: int = 8) -> Seer:
    known = {tuple(p): one[0] for p, one in zip(prompts(len(expected)), expected, strict=True)}
    harness.engine._runner._speculator.proposer = seer = Seer(known, wrong, bad)
    return seer


def count(harness: Harness) -> tuple[int, int]:
    load = harness.engine.load_now()
    return load.draft_tokens, load.accepted_tokens


# ---------------------------------------------------------------- the same texts


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("options", [{}, {"slots": 4, "batch_tokens": 16}], ids=["wide", "tight"])
def test_a_crowd_of_all_sorts_gets_the_same_texts(gguf: Make, wrong: float, options: Any) -> None:
    expected = run_crowd(gguf(options))
    engine = gguf(options | NGRAM)
    seer = use_seer(engine, expected, wrong)
    assert run_crowd(engine) == expected
    proposed, accepted = count(engine)
    assert proposed > 50
    assert accepted > 0.5 * proposed if wrong == 0.0 else accepted < 0.8 * proposed
    if wrong == 0.0:
        assert any(len(out.token_ids) > 3 for outs in engine.outputs.values() for out in outs)
    assert not seer.running
    assert not engine.engine._runner._speculator._chances
    assert run_crowd(engine) == expected, "what is left in the cache is right"


def test_a_full_cache_changes_no_text(gguf: Make) -> None:
    """Nothing is evicted for proposals, and a preempted request goes on."""
    asked: list[dict[str, Any]] = [{"ignore_eos": True, "max_tokens": 150}] * 4
    tight: dict[str, Any] = {"options": {"slots": 4}, "max_context": 250}
    expected = run_crowd(gguf(**tight), asked)
    engine = gguf(**tight | {"options": tight["options"] | NGRAM})
    engine.engine._runner._context.capacity = 256
    use_seer(engine, expected, 0.2)
    assert run_crowd(engine, asked) == expected
    assert count(engine)[1] > 100


def test_ngrams_find_what_repeats(gguf: Make) -> None:
    how: dict[str, Any] = {
        "logit_bias": tuple((token, 100.0) for token in (11, 12)),
        "max_tokens": 80,
        "ignore_eos": True,
    }
    expected = gguf().generate([5, 6, 7], **how)
    engine = gguf(NGRAM)
    assert engine.generate([5, 6, 7], **how) == expected
    assert count(engine)[1] > 30
    assert len(engine.outputs[1]) < 50


def test_who_leaves_takes_nothing_along(gguf: Make) -> None:
    engine = gguf(NGRAM)
    expected = run_crowd(gguf())
    seer = use_seer(engine, expected, 0.2)
    for _ in range(3):
        job = engine.submit(prompts(1)[0], max_tokens=200, ignore_eos=True)
        engine.until(lambda job=job: bool(engine.outputs.get(job)), "it has begun")  # type: ignore[misc]
        engine.engine.cancel(job)
    assert run_crowd(engine) == expected
    assert not seer.running


# ---------------------------------------------------------------- a draft model


def drafted(path: Path, **more: Any) -> dict[str, Any]:
    return {"speculative": {"method": "draft", "model": str(path), "tokens": 4}, **more}


def make_drafting(gguf: Make, path: Path) -> Harness:
    """An engine whose draft model is taken to cost nothing."""
    engine = gguf(drafted(path))
    engine.engine._runner._speculator.proposer.cost = 0.0
    return engine


@pytest.fixture
def noisy(gguf_file: Path, tmp_path: Path) -> Path:
    """The tiny model with noise on its weights, and a shorter context."""
    path = write_tiny_gguf(tmp_path / "noisy.gguf", float32=True, context=128)
    reader: Any = gguf.GGUFReader(path, "r+")
    drawn = np.random.default_rng(2)
    for one in reader.tensors:
        one.data[:] += (drawn.standard_normal(one.data.shape) * 0.01).astype(np.float32)
    return path


def test_a_draft_that_is_the_model_is_always_right(gguf: Make, gguf_file: Path) -> None:
    engine, plain = make_drafting(gguf, gguf_file), gguf()
    assert "4 proposed tokens (draft): 5 take" in engine.info.detail
    assert engine.info.kv_cache_bytes > plain.info.kv_cache_bytes
    for how in ({}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.0, "top_k": 20, "seed": 4}):
        wanted: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, **how}
        prompt = (prompts(3)[2] * 4)[:190]
        assert engine.generate(prompt, **wanted) == plain.generate(prompt, **wanted)
    proposed, accepted = count(engine)
    assert accepted > 0.97 * proposed > 100


def test_a_crowd_with_a_draft(gguf: Make, noisy: Path) -> None:
    expected = run_crowd(gguf())
    engine = make_drafting(gguf, noisy)
    for _ in range(2):
        assert run_crowd(engine) == expected
    proposed, accepted = count(engine)
    assert 0.1 * proposed < accepted < proposed
    assert not engine.engine._runner._speculator.proposer._readings
    long = random.Random(2).choices(range(3, 250), k=120)  # to the end of its context and beyond
    wanted: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    assert engine.generate(long, **wanted) == gguf().generate(long, **wanted)
    assert not engine.engine._runner._speculator.failure


def test_a_draft_that_fails_costs_no_request(
    gguf: Make, noisy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_crowd(gguf())
    engine = make_drafting(gguf, noisy)
    context, calls = engine.engine._loaded.draft.context, iter(range(5))
    decode = context.decode_batch
    monkeypatch.setattr(context, "decode_batch", lambda: (next(calls), decode())[1])
    assert run_crowd(engine) == expected
    assert engine.engine._runner._speculator.failure.startswith("StopIteration")
    assert run_crowd(engine) == expected


def test_a_draft_that_fails_from_the_beginning_is_told(
    gguf: Make, noisy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def propose(self: DraftProposer, wanted: Any) -> Any:
        raise ValueError("no such layer")

    monkeypatch.setattr(DraftProposer, "propose", propose)
    with pytest.raises(LoadError, match="no tokens can be proposed: ValueError: no such layer"):
        gguf(drafted(noisy))


def test_what_cannot_be_is_told(
    gguf: Make, tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny_gguf(tmp_path / "o.gguf", float32=True, added=(["<more>"], 4))
    with pytest.raises(LoadError, match=r"cannot draft: its vocabulary .* 1 tokens differ"):
        gguf(drafted(other))
    padded = write_tiny_gguf(tmp_path / "p.gguf", float32=True, added=(["[PAD1]", "[PAD2]"], 5))
    one = gguf(drafted(padded))  # of unused tokens there may be more
    assert one.generate([5, 6, 7]) == gguf().generate([5, 6, 7])
    with pytest.raises(LoadError, match="is for text, and model generates none"):
        gguf(NGRAM | {"pooling": "mean"})
    pooled = write_tiny_gguf(tmp_path / "e.gguf", float32=True, llama__pooling_type=1)
    with pytest.raises(LoadError, match=r"the draft model .* generates no text"):
        gguf(drafted(pooled))
    made = Model.__init__

    def make_recurrent(self: Model, *args: Any) -> None:
        made(self, *args)
        self.rewinds = False

    monkeypatch.setattr(Model, "__init__", make_recurrent)
    with pytest.raises(LoadError, match="this model is recurrent"):
        gguf(NGRAM)


# ---------------------------------------------------------------- values that are not numbers


@pytest.fixture
def poisoned(tmp_path: Path) -> Iterator[tuple[Harness, Harness]]:
    """Engines, plain and speculating, over a model that computes NaN once it reads token 200."""
    path = write_tiny_gguf(tmp_path / "m.gguf", float32=True, tied=False)
    reader: Any = gguf.GGUFReader(path, "r+")
    [embedding] = [one for one in reader.tensors if one.name == "token_embd.weight"]
    embedding.data[200] = np.nan
    made = llamacpp(path, {}), llamacpp(path, NGRAM)
    yield made
    for one in made:
        one.close()


def test_nan_after_a_proposed_token_costs_no_request(poisoned: tuple[Harness, Harness]) -> None:
    plain, engine = poisoned
    asked: list[dict[str, Any]] = [{"ignore_eos": True, "logit_bias": ((200, -100.0),)}] * 3
    expected = run_crowd(plain, asked)
    use_seer(engine, expected, 0.3, bad=200)
    assert run_crowd(engine, asked) == expected
    assert count(engine)[0] > 0


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize(
    ("tokens", "ratio", "worth"), [(5, 5.0, 0.0), (5, 9.0, 0.0), (5, 3.0, 1.0), (5, 1.0, 128.0)]
)
def test_the_worth_of_the_weights(tokens: int, ratio: float, worth: float) -> None:
    assert estimate(tokens, ratio) == worth
