"""The whole engine with `decode: graph`, which on a CPU is the same path without graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.transformers import runner_factory
from servekit.engines.transformers.decode import kernels
from servekit.engines.transformers.decode.batch_slots import BatchSlot, BatchSlots
from servekit.engines.transformers.decode.decode_loop import StepOptions
from servekit.engines.transformers.request_row import Row
from servekit.errors import LoadError
from tests.unit.engines.harness import PROMPTS, Harness, reference
from tests.unit.engines.text.test_structured_output import DIGITS, JSON
from tests.unit.engines.transformers.lora import making

Make = Callable[..., Harness]
GRAPH: dict[str, Any] = {"decode": "graph"}
NGRAM: dict[str, Any] = {"speculative": {"method": "ngram", "tokens": 5, "ngram_min": 1}}


@pytest.mark.parametrize(
    ("options", "how"),
    [(GRAPH, "attention"), (NGRAM, "attention, 5 proposed tokens (ngram)")],
    ids=["graph", "ngram"],
)
def test_greedy_in_a_crowd_of_all_sorts(
    harness: Make, tiny: Harness, tiny_model: Path, options: dict[str, Any], how: str
) -> None:
    one = harness(options=options)
    assert one.info.detail.endswith(f"; decoding: no CUDA graphs, reference {how}")
    expected = reference(tiny_model, PROMPTS, 24)
    asked: list[dict[str, Any]] = [
        {"grammar": JSON, "max_tokens": 60, "logprobs": 3},
        {"grammar": DIGITS, "temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "top_p": 0.9, "seed": 4, "presence_penalty": 1.0},
        {"temperature": 0.8, "top_k": 30, "seed": 5},
        {"max_tokens": 40, "repetition_penalty": 1.1, "ignore_eos": True, "logprobs": 1},
        {"max_tokens": 40, "logit_bias": ((40, 60.0), (41, 60.0)), "min_tokens": 9},
    ]
    jobs = [one.submit(prompt, max_tokens=24, ignore_eos=True) for prompt in PROMPTS]
    others = [one.submit(PROMPTS[0], **params) for params in asked]
    assert [one.tokens(job) for job in jobs] == expected
    for job, params in zip(others, asked, strict=True):
        assert one.tokens(job) == tiny.generate(PROMPTS[0], **params)
    begun = expected[0][:9]
    continued = one.submit(PROMPTS[0], emitted=begun, max_tokens=24, ignore_eos=True)
    assert begun + one.tokens(continued) == expected[0]
    load = one.engine.load_now()
    assert 0 <= load.accepted_tokens <= load.draft_tokens
    assert bool(load.accepted_tokens) == (options is NGRAM)


@pytest.mark.parametrize("options", [GRAPH, NGRAM], ids=["graph", "ngram"])
def test_adapters_share_its_steps(
    harness: Make,
    tiny_model: Path,
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for those with a model of their own, whose steps take turns with the others'."""
    seated: set[str] = set()
    assign = BatchSlots.assign

    def noting(self: BatchSlots, row: Row, *more: Any) -> BatchSlot:
        seated.add("" if row.adapter is None else row.adapter.name)
        return assign(self, row, *more)

    monkeypatch.setattr(BatchSlots, "assign", noting)
    one = harness(options=options)
    kinds = ("lora", "rslora", "prompt", "ia3")
    for seed, kind in enumerate(kinds):
        folder = making.write(tiny_model, tmp_path / kind, making.configs()[kind], seed)
        one.engine.load_adapter(making.spec(folder))
    count, prompts = 12, PROMPTS[:2]
    asked: dict[str, Any] = {"max_tokens": count, "ignore_eos": True}
    names = ("", *kinds)
    jobs = [(name, one.submit(text, adapter=name, **asked)) for text in prompts for name in names]
    said = {name: [one.tokens(job) for own, job in jobs if own == name] for name in names}
    assert said.pop("") == reference(tiny_model, prompts, count)
    for name, texts in said.items():
        assert texts == making.reference(tiny_model, tmp_path / name, prompts, count)
    assert seated == {"", "lora", "rslora", "prompt"}


@pytest.mark.parametrize("options", [GRAPH, NGRAM], ids=["graph", "ngram"])
def test_it_sleeps_and_wakes(harness: Make, options: dict[str, Any]) -> None:
    one = harness(options=options)
    before = one.generate(PROMPTS[0])
    one.engine.sleep()
    one.engine.wake()
    assert one.generate(PROMPTS[0]) == before


def test_a_kernel_that_is_wrong_leaves_decoding_to_the_library(
    harness: Make, monkeypatch: pytest.MonkeyPatch, tiny: Harness
) -> None:
    def wrong(*case: Any) -> Any:
        return 0 * kernels.reference_attention(*case)

    wish = StepOptions(kernels.Kernel("wrong", wrong), 512, graphs=False, ahead=True)
    monkeypatch.setattr(runner_factory, "step_options", lambda *asked: wish)
    one = harness()
    assert one.info.detail.endswith("; decoding: the library's, since its decoding failed its test")
    assert one.generate(PROMPTS[0]) == tiny.generate(PROMPTS[0])
    with pytest.raises(LoadError, match="decode is graph, and its decoding failed its test"):
        harness(options=GRAPH)


def test_what_cannot_be_is_told(harness: Make) -> None:
    with pytest.raises(LoadError, match=r"options.decode is graph, and flash3: .*not installed"):
        harness(options=GRAPH | {"decode_attention": "flash3"})
    with pytest.raises(LoadError, match=r"options.speculative needs servekit's own .*flash3"):
        harness(options=NGRAM | {"decode_attention": "flash3"})
    with pytest.raises(LoadError, match=r"options.speculative needs continuous batching, and"):
        harness(options=NGRAM | {"batching": "static"})
