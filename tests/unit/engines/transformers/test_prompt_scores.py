"""Log probabilities of prompts: plain transformers' own, whatever is beside them in the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from servekit.engines.transformers import prompt_scores
from servekit.protocol.messages import PromptToken
from tests.unit.engines.harness import Harness, byte_level_tokenizer, make_spec
from tests.unit.engines.transformers.lora.making import configs, write

SHORT = list(range(60, 67))
LONG = [(7919 * at) % 390 for at in range(3, 150)]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
}
#: What a head does beside a multiplication, and how models are built that are not as Llama is.
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gemma2": SIZES
    | {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "cohere": SIZES | {"logit_scale": 0.25},
    "granite": SIZES | {"logits_scaling": 3.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.4},
    "mamba": {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "initializer_range": 0.4},
}


def model_of(kind: str, folder: Path) -> Path:
    """A random model of this kind, with more rows than its tokenizer knows."""
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    ends = {"eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=403, **MODELS[kind], **ends)
    make: Any = AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def expected(folder: Path | Any, ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities of each token but the first, [tokens - 1, vocabulary]."""
    model: Any = folder
    if isinstance(folder, Path):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)])).logits[0, :-1].float()
    logs: torch.Tensor = logits.log_softmax(-1)
    return logs


def assert_same(told: list[PromptToken] | None, logs: torch.Tensor, ids: Sequence[int]) -> None:
    assert told is not None
    assert [one.id for one in told] == list(ids)
    assert told[0].logprob is None
    own = logs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    found = torch.tensor([one.logprob for one in told[1:]], dtype=torch.float32)
    torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)
    for one, row in zip(told[1:], logs, strict=True):
        best = row.topk(len(one.best)).values
        values = torch.tensor([value for _, _, value in one.best], dtype=torch.float32)
        torch.testing.assert_close(values, best, atol=1e-4, rtol=1e-4)
        if one.best and one.rank <= len(one.best):
            assert abs(one.best[one.rank - 1][2] - (one.logprob or 0.0)) < 1e-4


def prompt_of(harness: Harness, job: int) -> list[PromptToken] | None:
    harness.tokens(job)
    return harness.outputs[job][0].prompt


@pytest.mark.lane("long")
@pytest.mark.parametrize("batching", ["auto", "static"])
@pytest.mark.parametrize("kind", MODELS)
def test_they_are_those_of_the_plain_model(
    kind: str, batching: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "PIECE_BYTES", 4 * 403 * 5)  # five tokens at a time
    folder = model_of(kind, tmp_path / "model")
    options = {"batching": batching, "max_batch_tokens": 32}
    harness = Harness(make_spec(folder, options=options))
    try:
        assert "prompt_logprobs" in harness.info.serves
        beside = [harness.submit(LONG[at:], max_tokens=9) for at in range(3)]
        jobs = [
            harness.submit(ids, max_tokens=4, prompt_logprobs=count)
            for ids, count in ((LONG, 3), (SHORT, 0), (LONG[5:], 1), (SHORT[:1], 2))
        ]
        alone = expected(folder, LONG)
        assert_same(prompt_of(harness, jobs[0]), alone, LONG)
        assert_same(prompt_of(harness, jobs[1]), expected(folder, SHORT), SHORT)
        assert_same(prompt_of(harness, jobs[2]), expected(folder, LONG[5:]), LONG[5:])
        [only] = prompt_of(harness, jobs[3]) or []
        assert (only.id, only.logprob) == (SHORT[0], None)
        again = harness.submit(LONG, max_tokens=4, prompt_logprobs=3)  # its prompt is in the cache
        assert_same(prompt_of(harness, again), alone, LONG)
        assert harness.tokens(again) == harness.tokens(harness.submit(LONG, max_tokens=4))
        for at, job in enumerate(beside):
            assert harness.tokens(job) == harness.generate(LONG[at:], max_tokens=9)
    finally:
        harness.close()


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_they_are_the_adapters_own(
    harness: Callable[..., Harness], tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    from peft import PeftModel

    from servekit.protocol.adapters import AdapterSpec

    folder = write(tiny_model, tmp_path / "adapter", configs()[kind])
    engine = harness(adapters=(AdapterSpec("tuned", str(folder)),))
    assert engine.info.refused_adapters == {}
    beside = engine.submit(LONG, max_tokens=4, prompt_logprobs=1)
    job = engine.submit(LONG, max_tokens=4, prompt_logprobs=1, adapter="tuned")
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert_same(prompt_of(engine, beside), expected(base, LONG), LONG)
    model = PeftModel.from_pretrained(base, folder)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([LONG])).logits[0]
    logs = logits[-len(LONG) :][:-1].float().log_softmax(-1)
    assert_same(prompt_of(engine, job), logs, LONG)


@pytest.mark.lane("long")
def test_a_request_that_makes_room_and_comes_back_tells_each_token_once(
    harness: Callable[..., Harness], tiny_model: Path
) -> None:
    engine = harness(options={"kv_cache_bytes": 3 * 2**16, "slots": 4, "max_batch_tokens": 16})
    jobs = [
        engine.submit(LONG, max_tokens=120, ignore_eos=True, prompt_logprobs=0) for _ in range(4)
    ]
    for job in jobs:
        assert_same(prompt_of(engine, job), expected(tiny_model, LONG), LONG)
        assert len(engine.tokens(job)) == 120
