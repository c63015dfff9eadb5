"""A draft model in pages of its own: the better it is the fewer the steps; the text is the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from servekit.engines.api.speculation import Speculation, Speculator
from servekit.engines.transformers.batching import kv_cache, paged_attention
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.decode.draft_model import DraftProposer
from servekit.engines.transformers.decode.speculation_setup import check_tokenizers
from servekit.errors import LoadError
from tests.unit.engines.harness import PROMPTS, Harness, reference, write_tiny_llama
from tests.unit.engines.seeing_model import LIBRARY
from tests.unit.engines.transformers.decode.crowds import (
    BLOCK,
    REFERENCE,
    UNWATCHED,
    WATCHED,
    Crowd,
    ends,
    row,
    runner,
    texts,
    wish,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[..., Harness]
CHUNK = 32


def drafted(
    folder: Path, noise: float, *, blocks: int = 200, tokens: int = 4, worth: float = 1e9
) -> tuple[ContinuousRunner, Speculator]:
    """A runner whose draft is the model itself, with noise on its weights."""
    loads: Any = AutoModelForCausalLM
    draft = loads.from_pretrained(folder, attn_implementation="sdpa").eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * noise)
    shape = kv_cache.shape_of(draft.config, 4)
    draft.set_attn_implementation(paged_attention.NAME)
    proposer = DraftProposer(draft, shape, 0.0, REFERENCE, graphs=False, chunk=CHUNK)
    speculator = Speculator(proposer, Speculation("draft", tokens=tokens), worth)
    return runner(folder, wish(ahead=True)._replace(speculator=speculator), blocks), speculator


@pytest.mark.parametrize(
    ("noise", "least", "most"), [(0.0, 0.97, 1.0), (0.03, 0.1, 0.95), (9, 0, 0.1)]
)
def test_a_crowd_gets_the_same_texts(
    tiny_model: Path, noise: float, least: float, most: float
) -> None:
    hows = UNWATCHED + WATCHED
    expected = Crowd.of(2, 14, hows, 60).run(runner(tiny_model, None))
    engine, speculator = drafted(tiny_model, noise)
    found = Crowd.of(2, 14, hows, 60).run(engine)
    assert texts(found) == texts(expected)
    assert ends(found) == ends(expected)
    counts = speculator.counts
    assert counts.drafts > 20
    # Penalties, biases and the like are the model's alone.
    assert least * 0.8 <= counts.accepted_tokens / counts.draft_tokens <= most
    proposer: Any = speculator.proposer
    assert not proposer._readings


@pytest.mark.parametrize("how", UNWATCHED)
def test_it_knows_what_the_model_knows(tiny_model: Path, how: dict[str, Any]) -> None:
    """If the draft is the model, all is accepted: across pages, and after long prompts."""
    prompt = [20 + at % 300 for at in range(3 * CHUNK + 5)]
    one = row("r", prompt, 100, **how)
    one.eos = frozenset()
    engine, speculator = drafted(tiny_model, 0.0)
    outputs = Crowd([(0, one)]).run(engine)["r"]
    assert speculator.counts.accepted_tokens == speculator.counts.draft_tokens > 60
    assert len(outputs) < 30


def test_blocks_that_it_has_read_are_not_read_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[tuple[int, int]] = []
    read = DraftProposer._read_chunk

    def reading(self: DraftProposer, slot: Any, known: int) -> int:
        chunks.append((known, read(self, slot, known)))
        return chunks[-1][1]

    monkeypatch.setattr(DraftProposer, "_read_chunk", reading)
    prompt = [20 + at % 300 for at in range(10 * BLOCK)]
    engine, speculator = drafted(tiny_model, 0.0)
    first, second = row("first", prompt, 60), row("second", [*prompt, 7, 8, 9], 30)
    first.eos = second.eos = frozenset()
    Crowd([(0, first)]).run(engine)
    assert chunks[0] == (0, CHUNK)
    assert chunks[-1][1] >= len(prompt) - 16
    chunks.clear()
    before = speculator.counts
    Crowd([(0, second)]).run(engine)
    assert not chunks
    proposed, accepted = (
        speculator.counts.draft_tokens - before.draft_tokens,
        speculator.counts.accepted_tokens - before.accepted_tokens,
    )
    assert accepted == proposed > 15


def test_a_row_for_which_no_slot_is_left(tiny_model: Path) -> None:
    """The first row takes all slots of a pass, and of the second one only the last token is new."""
    whole = list(range(50, 50 + BLOCK))
    engine, speculator = drafted(tiny_model, 0.0)
    first = row("first", whole, 40)
    first.eos = frozenset()
    Crowd([(0, first)]).run(engine)
    rows = [row("wide", list(range(100, 100 + engine.plan.slots - 1)), 12), row("full", whole, 40)]
    for one in rows:
        one.eos = frozenset()
    Crowd([(0, one) for one in rows]).run(engine)
    assert rows[1].completion == first.completion
    assert not speculator.failure


def test_a_draft_with_a_shorter_context(harness: Make, tiny_model: Path, tmp_path: Path) -> None:
    """It has no embeddings for later positions, and nothing is proposed there."""
    config = LIBRARY.GPT2Config(
        vocab_size=len(AutoTokenizer.from_pretrained(tiny_model)),
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
    )
    LIBRARY.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path)
    asked = {"speculative": {"method": "draft", "model": str(tmp_path), "tokens": 6}}
    one, plain = harness(options=asked), harness()
    prompts = ["x" * length for length in (50, 30, 200)]
    said = []
    for engine in (one, plain):
        jobs = [engine.submit(text, max_tokens=60, ignore_eos=True) for text in prompts]
        said.append([engine.tokens(job) for job in jobs])
    assert said[0] == said[1]
    speculator = one.engine._runner._step_options.speculator
    assert speculator.counts.draft_tokens > 20 and not speculator.failure


def test_a_draft_that_fails_costs_no_request(
    harness: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_tiny_llama(tmp_path, hidden_size=32)
    one = harness(options={"speculative": {"method": "draft", "model": str(small)}})
    one.engine._runner._step_options.speculator.proposer.cost = 0.0
    expected = harness().generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
    draft, calls = DraftProposer._draft, iter(range(3))

    def draft_thrice(self: DraftProposer, ready: Any) -> Any:
        next(calls)
        return draft(self, ready)

    monkeypatch.setattr(DraftProposer, "_draft", draft_thrice)
    assert one.generate(PROMPTS[0], max_tokens=40, ignore_eos=True) == expected
    assert one.engine._runner._step_options.speculator.failure.startswith("StopIteration")
    monkeypatch.undo()
    assert one.generate(PROMPTS[0], max_tokens=40, ignore_eos=True) == expected


def test_a_draft_that_fails_from_the_beginning_is_told(
    harness: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_tiny_llama(tmp_path, hidden_size=16)

    def propose(self: DraftProposer, wanted: Any) -> Any:
        raise ValueError("no such layer")

    monkeypatch.setattr(DraftProposer, "propose", propose)
    with pytest.raises(LoadError, match="no tokens can be proposed: ValueError: no such layer"):
        harness(options={"speculative": {"method": "draft", "model": str(small)}})


def test_rows_that_were_taken_out_and_return(tiny_model: Path) -> None:
    """Their blocks are others then, and what was drafted is read again."""

    def crowd() -> Crowd:
        rows = [row(f"r{i}", list(range(20 + i, 40 + i)), 200, i) for i in range(3)]
        for one in rows:
            one.eos = frozenset()
        return Crowd([(0, one) for one in rows])

    expected = crowd().run(runner(tiny_model, None))
    engine, speculator = drafted(tiny_model, 0.0, blocks=20)
    found = crowd().run(engine)
    assert texts(found) == texts(expected)
    assert speculator.counts.accepted_tokens > 0.9 * speculator.counts.draft_tokens


def test_pages_can_be_dropped_and_made_again(tiny_model: Path) -> None:
    engine, speculator = drafted(tiny_model, 0.0)
    before = texts(Crowd.of(4, 4, UNWATCHED, 20).run(engine))
    engine.drop_pages()
    assert not hasattr(speculator.proposer, "_pages")
    engine.make_pages()
    assert texts(Crowd.of(4, 4, UNWATCHED, 20).run(engine)) == before


def test_an_engine_with_a_draft_model(harness: Make, tiny_model: Path, tmp_path: Path) -> None:
    small = write_tiny_llama(tmp_path, hidden_size=32)
    asked = {"speculative": {"method": "draft", "model": str(small), "tokens": 3}}
    plain, one = harness(), harness(options=asked)
    assert one.info.detail.endswith("attention, 3 proposed tokens (draft)")
    expected = reference(tiny_model, PROMPTS, 24)
    jobs = [one.submit(prompt, max_tokens=24, ignore_eos=True) for prompt in PROMPTS]
    assert [one.tokens(job) for job in jobs] == expected
    assert one.info.kv_cache_bytes > plain.info.kv_cache_bytes
    begun = expected[0][:9]
    continued = one.submit(PROMPTS[0], emitted=begun, max_tokens=24, ignore_eos=True)
    assert begun + one.tokens(continued) == expected[0]
    one.engine.sleep()
    one.engine.wake()
    assert one.generate(PROMPTS[0]) == plain.generate(PROMPTS[0])


def test_a_draft_with_more_and_with_fewer_tokens(
    harness: Make, tiny_model: Path, tmp_path: Path
) -> None:
    """The head of a smaller model may be padded otherwise, with the same tokenizer."""
    (tmp_path / "wide").mkdir()
    wide = write_tiny_llama(tmp_path / "wide", hidden_size=32, spare_tokens=60)
    asked = {"speculative": {"method": "draft", "model": str(wide)}}
    one = harness(options=asked)
    assert one.generate(PROMPTS[0]) == harness().generate(PROMPTS[0])
    asked = {"speculative": {"method": "draft", "model": str(tiny_model)}}
    padded = harness(wide, options=asked)
    forced = {"logit_bias": ((padded.engine.vocab_size - 1, 100.0),), "max_tokens": 12}
    said = padded.generate(PROMPTS[0], **forced)
    assert said == harness(wide).generate(PROMPTS[0], **forced)


def test_what_cannot_draft_is_told(harness: Make, tiny_model: Path, tmp_path: Path) -> None:
    class Tokenizer:
        def __init__(self, *words: str) -> None:
            self._words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: at for at, word in enumerate(self._words)}

    check_tokenizers(Tokenizer("a", "b"), Tokenizer("a", "b"), "the draft model x")
    with pytest.raises(LoadError, match=r"the draft model x cannot draft: .* 2 tokens differ"):
        check_tokenizers(Tokenizer("a", "b"), Tokenizer("a", "c"), "the draft model x")
    missing = {"speculative": {"method": "draft", "model": str(tmp_path)}}
    with pytest.raises(LoadError):
        harness(options=missing)
