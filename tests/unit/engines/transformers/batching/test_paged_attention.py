"""Attention request by request: the same text as any other, whatever shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from servekit.engines.transformers.batching import paged_attention, self_check
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.batching.paged_attention import Layout
from servekit.engines.transformers.decode.page_table import Holder
from servekit.engines.transformers.sequential import StaticRunner
from servekit.errors import LoadError
from tests.unit.engines.harness import Harness, byte_level_tokenizer, reference

Make = Callable[..., Harness]
CPU = torch.device("cpu")


def test_fresh_prompts_read_no_cache() -> None:
    layout = Layout.build([0, 0], [3, 1], CPU)
    assert layout.gather is None
    assert not layout.groups
    spans = [(c.span.query, c.span.queries, c.span.key, c.span.keys) for c in layout.chunks]
    assert spans == [(0, 3, 0, 3), (3, 1, 3, 1)]
    assert all(chunk.mask is None for chunk in layout.chunks)


def test_decoding_requests_of_like_length_share_a_group() -> None:
    layout = Layout.build([10, 400, 90, 420], [1, 1, 1, 1], CPU)
    assert [group.rows.tolist() for group in layout.groups] == [[0, 2], [1, 3]]
    assert [group.length for group in layout.groups] == [96, 448]
    masks = [group.mask for group in layout.groups if group.mask is not None]
    assert [mask.sum((1, 2, 3)).tolist() for mask in masks] == [[11, 91], [401, 421]]


def test_a_request_alone_has_all_its_keys_and_nothing_masked() -> None:
    layout = Layout.build([500, 6], [1, 1], CPU)  # not of like length
    long, short = layout.groups
    assert (long.rows.tolist(), long.length, long.mask) == ([0], 501, None)
    assert (short.rows.tolist(), short.length, short.mask) == ([1], 7, None)
    assert long.bias(torch.zeros(1)) is None
    assert layout.gather is not None
    assert layout.gather.tolist() == list(range(508))


def test_packed_requests_are_told_by_where_they_end() -> None:
    layout = Layout.build([10, 0, 90], [1, 7, 3], CPU, packed=True)
    assert layout.packed is not None
    assert (layout.gather, layout.groups, layout.chunks) == (None, [], [])
    assert layout.packed.query_ends.tolist() == [0, 1, 8, 11]
    assert layout.packed.key_ends.tolist() == [0, 11, 18, 111]
    assert (layout.packed.most_queries, layout.packed.most_keys) == (7, 93)
    assert layout.packed.query_ends.dtype == layout.packed.key_ends.dtype == torch.int32


def test_no_packed_kernel_on_a_cpu_or_in_32_bits() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert not paged_attention.has_packed_kernel(4, 2, 64, torch.empty(0, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_the_packed_kernel_agrees_on_a_gpu() -> None:
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    assert paged_attention.has_packed_kernel(4, 2, 64, like)
    assert not paged_attention.has_packed_kernel(4, 2, 64, like.float())


def test_a_mask_is_made_into_what_is_added_once_for_all_layers() -> None:
    (group,) = Layout.build([1, 2], [1, 1], CPU).groups
    bias = group.bias(torch.zeros(1, dtype=torch.bfloat16))
    assert bias is not None and group.mask is not None
    assert bias.dtype == torch.bfloat16
    assert torch.equal(bias == 0, group.mask)
    assert torch.equal(bias == float("-inf"), ~group.mask)
    assert group.bias(torch.zeros(1, dtype=torch.bfloat16)) is bias


def test_padding_reads_the_requests_own_keys() -> None:
    layout = Layout.build([2, 5], [1, 1], CPU)
    (group,) = layout.groups
    assert layout.gather is not None
    first, second = layout.gather.view(2, group.length).tolist()
    assert first[:4] == [0, 1, 2, 2]
    assert second[:7] == [3, 4, 5, 6, 7, 8, 8]
    assert set(first) == {0, 1, 2}
    assert set(second) == set(range(3, 9))


def test_a_chunk_sees_its_past_and_no_future() -> None:
    layout = Layout.build([2, 4], [3, 1], CPU)
    (chunk,) = layout.chunks
    assert chunk.mask is not None
    assert chunk.mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert layout.gather is not None
    keys = layout.gather[chunk.span.key : chunk.span.key + chunk.span.keys]
    assert keys.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "attention", [None, "sdpa", pytest.param("eager", marks=pytest.mark.lane("long"))]
)
def test_lengths_chunks_and_decodes_mix_in_one_batch(
    harness: Make, tiny_model: Path, attention: str | None
) -> None:
    one = harness(options={"max_batch_tokens": 48, "attention": attention})
    lengths = [1, 2, 7, 31, 130, 90, 3, 260, 1, 40]
    prompts = ["a" * length for length in lengths]
    expected = reference(tiny_model, prompts, 30)
    jobs = [one.submit(prompt, max_tokens=30, ignore_eos=True) for prompt in prompts]
    assert [one.tokens(job) for job in jobs] == expected


def test_it_is_used_where_it_suits(harness: Make) -> None:
    assert paged_attention.NAME in harness().info.detail
    assert "sdpa" in harness(options={"attention": "sdpa"}).info.detail


# ---------------------------------------------------------------- what only some models have

#: Layers with a window of 16 tokens beside others; a window alone says little of short texts.
UNUSUAL: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4, "head_dim": 16},
    "vaultgemma": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4, "head_dim": 16},
    "gemma3_text": {"query_pre_attn_scalar": 4, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


def write_unusual(kind: str, folder: Path) -> Any:
    """A random model of this kind whose sinks, if it has any, matter; returns it, run eagerly."""
    byte_level_tokenizer().save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "sliding_window": 16,
    }
    ends = {"eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=400, **sizes, **UNUSUAL[kind], **ends)
    library: Any = AutoModelForCausalLM  # untyped
    model = library.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 2)
    model.save_pretrained(folder)
    return library.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def assert_log_probabilities(plain: Any, one: Harness, prompts: list[list[int]]) -> list[list[int]]:
    """Run them side by side; each token is as likely as the plain model says. Returns the texts."""
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    jobs = [one.submit(prompt, **asked) for prompt in prompts]
    texts = [one.tokens(job) for job in jobs]
    for prompt, text, job in zip(prompts, texts, jobs, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + text]), use_cache=False).logits[0]
        logs = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        assert text == logs.argmax(-1).tolist()
        told = torch.tensor([token.logprob for token in one.logprobs(job)])
        own = logs.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(told, own, atol=1e-4, rtol=1e-4)
    return texts


@pytest.mark.lane("long")
@pytest.mark.parametrize("decode", ["auto", "graph"])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_soft_caps_sinks_and_windows_are_the_models_own(
    harness: Make, tmp_path: Path, kind: str, decode: str
) -> None:
    plain = write_unusual(kind, tmp_path)
    options = {"max_batch_tokens": 32, "batching": "continuous", "decode": decode}
    one = harness(tmp_path, options=options)
    assert one.engine._runner.decodes == ""  # no kernel knows of any of these
    whole = [(7919 * at) % 390 for at in range(3, 90)]
    prompts = [whole, whole[5:60], whole[3:10], whole[:1]]
    texts = assert_log_probabilities(plain, one, prompts)
    for prompt, text in zip(prompts, texts, strict=True):  # another worker's tokens
        job = one.submit(prompt, emitted=text[:9], max_tokens=24, ignore_eos=True)
        assert one.tokens(job) == text[9:]


def test_eager_attention_of_no_model_refuses_what_it_would_leave_out() -> None:
    states = torch.zeros(1, 1, 1, 8)
    library: Any = AttentionInterface  # untyped
    attend = library().get_interface("paged|eager", lambda: None)
    for name in ("softcap", "s_aux"):
        with pytest.raises(NotImplementedError, match=name):
            attend(torch.nn.Linear(1, 1), states, states, states, None, scaling=1.0, **{name: 5.0})


# ---------------------------------------------------------------- the probe at load time


def test_an_attention_that_is_wrong_is_found_out_and_not_used(
    harness: Make, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def neighbours(layout: Layout, packed: Any) -> Any:
        return packed if layout.gather is None else packed[layout.gather].flip(0)

    monkeypatch.setattr(Layout, "read_index", neighbours)
    one = harness()
    assert isinstance(one.engine._runner, ContinuousRunner)
    assert paged_attention.NAME not in one.info.detail
    expected = reference(tiny_model, ["The quick"], 12)
    assert [one.generate("The quick", max_tokens=12, ignore_eos=True)] == expected


def test_a_model_that_fails_the_probe_runs_one_request_at_a_time(
    harness: Make, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "_TOLERANCE", {torch.float32: -1.0})
    one = harness()
    assert isinstance(one.engine._runner, StaticRunner)
    expected = reference(tiny_model, ["The quick"], 12)
    assert [one.generate("The quick", max_tokens=12, ignore_eos=True)] == expected
    with pytest.raises(LoadError, match="its logits are off"):
        harness(options={"batching": "continuous"})


def test_a_layer_that_calls_its_cache_leaves_it_to_the_attention(harness: Make) -> None:
    """From transformers 5.24 on a layer passes its states through its cache, and `kwargs` on."""
    runner: Any = harness().engine._runner
    cache, states = runner._processor.cache, (torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    called = "kwargs" in signature(cache.update).parameters
    for one in (cache, Holder()) if called else (Holder(),):
        told: dict[str, Any] = {"read_index": None}
        assert one.update(*states, 0, kwargs=told) == states
        assert told["cache"] is one
