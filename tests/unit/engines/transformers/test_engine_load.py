"""Loading: many kinds of models, and a sentence for each way it can fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    Qwen3Config,
)
from transformers.generation.continuous_batching import continuous_api

from servekit.engines.api import load_phases
from servekit.engines.transformers import weights
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.engine import TransformersEngine
from servekit.engines.transformers.sequential import StaticRunner
from servekit.errors import ContextLengthExceeded, LoadError
from servekit.protocol.control.startup_messages import Phase
from servekit.protocol.messages import ChatMessage
from tests.unit.engines.harness import (
    PROMPTS,
    Harness,
    assert_alive,
    byte_level_tokenizer,
    make_spec,
    reference,
)
from tests.unit.engines.speaking import write_model

Make = Callable[..., Harness]


def test_a_chat_template_of_ones_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "Qwen3-Coder", [], [])
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    one = Harness(make_spec(folder, chat_template=source), TransformersEngine)
    codec = one.engine.codec
    assert codec.render_chat([ChatMessage("user", "abc")]) == codec.encode("[abc]")
    assert "tools" not in one.info.serves and "forced_tools" in one.info.serves
    one.close()


# ---------------------------------------------------------------- other ways to run


BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HYBRID = ["sliding_attention", "full_attention"]
LIBRARY: Any = transformers  # untyped in part
FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "by_request": (Qwen3Config, BASE | {"head_dim": 16}),
    "by_request moe": (MixtralConfig, BASE | {"num_local_experts": 4, "sliding_window": None}),
    "sdpa": (
        Gemma3TextConfig,
        BASE | {"head_dim": 16, "sliding_window": 16, "layer_types": HYBRID},
    ),
    "the heads of its layers differ": (
        LIBRARY.Gemma4TextConfig,
        {
            **(BASE | {"head_dim": 16, "global_head_dim": 32, "layer_types": HYBRID}),
            "sliding_window": 16,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 400,
        },
    ),
    "one request at a time": (
        BloomConfig,
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
    "it is recurrent": (
        LIBRARY.RecurrentGemmaConfig,
        BASE | {"num_hidden_layers": 3, "head_dim": 16, "w_init_variance_scale": 20.0},
    ),
}


def write_family(folder: Path, family: str) -> Path:
    """A small random model of `FAMILIES`."""
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    make, fields = FAMILIES[family]
    torch.manual_seed(0)
    library: Any = AutoModelForCausalLM  # untyped
    library.from_config(make(vocab_size=len(tokenizer), **fields)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "family",
    [
        *("by_request", "sdpa", "the heads of its layers differ"),
        *(
            pytest.param(family, marks=pytest.mark.lane("long"))
            for family in ("by_request moe", "one request at a time", "it is recurrent")
        ),
    ],
)
def test_other_families_say_what_generate_says(harness: Make, tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family)
    one = harness(tmp_path, options={"max_batch_tokens": 64})
    assert family.split(" moe")[0] in one.info.detail
    expected = reference(tmp_path, PROMPTS, 16)
    jobs = [one.submit(prompt, max_tokens=16, ignore_eos=True) for prompt in PROMPTS]
    assert [one.tokens(job) for job in jobs] == expected


def test_a_context_by_another_name_is_kept_to(harness: Make, tmp_path: Path) -> None:
    """MPT has biases for so many tokens, and a longer prompt would end the engine."""
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    library: Any = AutoModelForCausalLM  # untyped
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
    config = LIBRARY.MptConfig(vocab_size=len(tokenizer), expansion_ratio=2, **sizes)
    library.from_config(config).save_pretrained(tmp_path)
    one = harness(tmp_path)
    assert one.info.max_context == 64
    assert len(one.generate([5] * 60, max_tokens=4, ignore_eos=True)) == 4
    with pytest.raises(ContextLengthExceeded):
        one.submit([5] * 100)
    assert_alive(one)


def write_long_rope(folder: Path) -> Path:
    """A model with LongRoPE, whose long factors are for more than 32 tokens, as Phi 4 mini's."""
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
        "original_max_position_embeddings": 32,
    }
    more = {"original_max_position_embeddings": 32, "rope_parameters": rope}
    library: Any = AutoModelForCausalLM  # untyped
    config = LIBRARY.Phi3Config(vocab_size=len(tokenizer), **BASE, **more)
    library.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_text_has_the_same_rotary_factors_throughout(
    harness: Make, tmp_path: Path, batching: str
) -> None:
    """The library chooses them by the longest text of a step, and of a chunk by its end."""
    folder = write_long_rope(tmp_path)
    options = {"max_batch_tokens": 16, "batching": batching}
    short, long = PROMPTS[0], PROMPTS[4]
    one = harness(folder, options=options)
    assert len(one.engine.codec.encode(short)) + 16 < 32 < len(one.engine.codec.encode(long))
    assert one.generate(long, ignore_eos=True) == reference(folder, [long], 16)[0]
    alone = one.generate(short, ignore_eos=True, cache_salt="alone")
    beside = [one.submit(prompt, ignore_eos=True) for prompt in (long, short)]
    assert one.tokens(beside[1]) == alone
    bounded = harness(folder, options=options, max_context=32)
    assert bounded.generate(short, ignore_eos=True) == reference(folder, [short], 16)[0]


def test_no_flash_kernel_is_looked_for(harness: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the `kernels` package is installed, looking would ask the hub."""

    def asked(**_: object) -> bool:
        raise AssertionError("a flash kernel was looked for")

    for version in (2, 3):
        monkeypatch.setattr(continuous_api, f"is_flash_attn_{version}_available", asked)
    one = harness(options={"batching": "continuous"})
    assert_alive(one)


def test_that_a_cpu_has_no_kernels_is_no_failure_of_the_start(harness: Make) -> None:
    heard: list[Phase] = []
    load_phases.heard_by(heard.append)
    try:
        harness()
    finally:
        load_phases.heard_by(None)
    ended = {one.name: (one.failed, one.why) for one in heard if one.ended_s is not None}
    assert ended["kernels"] == (False, "not here") and ended["weights"] == (False, "")


def test_a_shared_prefix_is_read_once(
    harness: Make, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness(options={"block_size": 16})
    runner = one.engine._runner
    assert isinstance(runner, ContinuousRunner)
    prompt = "jumps over the lazy dog. " * 8
    sizes: list[int] = []
    ios = runner._processor.inputs_and_outputs
    prepare = ios.prepare_batch_tensors

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        sizes.append(ios.num_q_tokens)
        return result

    monkeypatch.setattr(ios, "prepare_batch_tensors", counted)
    answers = [one.generate(prompt, max_tokens=6, ignore_eos=True) for _ in range(2)]
    assert answers == reference(tiny_model, [prompt], 6) * 2
    assert max(sizes[:6]) > 2 * max(sizes[6:])


def test_it_tells_what_it_had_of_a_prompt(harness: Make) -> None:
    one = harness(options={"block_size": 16})
    assert (one.info.prefix_block, one.info.prefix_tokens > 0) == (16, True)
    ids = one.engine.codec.encode("jumps over the lazy dog. " * 8)
    found = []
    for prompt in (ids, ids, ids[:40], [*ids[:40], 5, *ids[40:]], ids[1:]):
        job = one.submit(prompt, max_tokens=3, ignore_eos=True)
        one.finish(job)
        assert len({output.cached_tokens for output in one.outputs[job]}) == 1
        found.append(one.outputs[job][0].cached_tokens)
    assert found == [0, (len(ids) - 1) // 16 * 16, 32, 32, 0]


def test_one_request_at_a_time_keeps_nothing(harness: Make) -> None:
    one = harness(options={"batching": "static"})
    assert (one.info.prefix_block, one.info.prefix_tokens) == (0, 0)


def test_a_recurrent_model_runs_one_request_at_a_time(harness: Make, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        initializer_range=0.4,
        eos_token_id=2,
        pad_token_id=0,
    )
    MambaForCausalLM(config).save_pretrained(tmp_path)
    one = harness(tmp_path)
    assert isinstance(one.engine._runner, StaticRunner)
    assert one.info.slots == 1
    expected = reference(tmp_path, PROMPTS[:3], 12)
    jobs = [one.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS[:3]]
    assert [one.tokens(job) for job in jobs] == expected
    with pytest.raises(LoadError, match="recurrent"):
        harness(tmp_path, options={"batching": "continuous"})


def test_the_configuration_caps_the_context(harness: Make) -> None:
    one = harness(max_context=64)
    assert one.info.max_context == 64
    with pytest.raises(ContextLengthExceeded):
        one.submit([5] * 60, max_tokens=5)


def test_sampling_defaults_of_the_file_apply(harness: Make, tiny: Harness) -> None:
    one = harness(sampling={"temperature": 0.0})
    greedy = tiny.generate(PROMPTS[0], temperature=0.0, max_tokens=8)
    assert one.generate(PROMPTS[0], temperature=None, max_tokens=8) == greedy


def test_top_k_of_the_files_is_off_below_zero(harness: Make, tiny: Harness, copy: Path) -> None:
    path = copy / "generation_config.json"
    own = {"do_sample": True, "temperature": 0.9, "top_k": -1, "top_p": 0.9}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    asked: dict[str, Any] = {"max_tokens": 16, "seed": 7, "ignore_eos": True}
    drawn = tiny.generate(PROMPTS[0], temperature=0.9, top_p=0.9, **asked)
    assert harness(copy).generate(PROMPTS[0], temperature=None, **asked) == drawn


def test_chat_is_rendered_and_answered(tiny: Harness) -> None:
    ids = tiny.engine.codec.render_chat([ChatMessage("user", "hi")])
    assert len(tiny.generate(ids, max_tokens=4, ignore_eos=True)) == 4


# ---------------------------------------------------------------- loading fails with a sentence


def refused(path: Path, **fields: Any) -> LoadError:
    with pytest.raises(LoadError) as caught:
        TransformersEngine(make_spec(path, **fields)).load(lambda progress: None)
    return caught.value


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change_config(folder: Path, **fields: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "nowhere" in str(refused(tmp_path / "nowhere"))


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "config.json" in str(refused(copy))


def test_a_config_that_is_no_json(copy: Path) -> None:
    (copy / "config.json").write_text("{ nonsense")
    assert "config.json" in str(refused(copy))


def test_an_unknown_architecture(copy: Path) -> None:
    change_config(copy, model_type="hal9000", architectures=["Hal9000ForCausalLM"])
    error = refused(copy)
    assert "Hal9000ForCausalLM" in str(error)
    assert error.permanent


def test_an_architecture_that_is_no_language_model(copy: Path) -> None:
    change_config(copy, model_type="vit", architectures=["ViTForImageClassification"])
    assert "ViTForImageClassification" in str(refused(copy))


def test_pickled_weights_only(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    error = refused(copy)
    assert "pytorch_model.bin" in str(error)
    assert "safetensors" in str(error)


def test_a_truncated_weights_file(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "damaged" in str(refused(copy))


def test_weights_that_the_library_would_draw(copy: Path) -> None:
    change_config(copy, num_hidden_layers=3)  # as after a copy without the last shard's index
    error = refused(copy)
    assert "have no model.layers.2.input_layernorm.weight, and lack 9 tensors" in str(error)
    assert error.permanent
    change_config(copy, quantization_config={"quant_method": "of another library"})
    weights.load_model(copy, make_spec(copy), None, lambda progress: None)


def test_code_of_the_model_runs_only_if_trusted(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (copy / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    change_config(
        copy,
        model_type="own",
        architectures=["Own"],
        auto_map={"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"},
    )
    assert "trust_remote_code: true" in str(refused(copy))
    assert not marker.exists()
    refused(copy, trust_remote_code=True)  # trusted, it runs, and is no model
    assert marker.exists()


def test_too_little_memory_may_pass(tiny_model: Path) -> None:
    with (
        pytest.raises(LoadError, match="does not fit") as caught,
        weights.explain_errors(tiny_model, make_spec(tiny_model)),
    ):
        torch.empty(2**60, dtype=torch.uint8)
    assert not caught.value.permanent


def test_a_cache_that_does_not_fit(tiny_model: Path) -> None:
    error = refused(tiny_model, options={"kv_cache_bytes": 2**50})
    assert "kv_cache_bytes" in str(error)
    assert not error.permanent


def test_weights_stay_in_the_page_cache_where_replicas_share_them(
    harness: Make, tiny_model: Path
) -> None:
    """Source: proc(5), /proc/PID/smaps: of a private mapping, what was written is one's own."""
    assert harness().generate(PROMPTS[0], max_tokens=4)
    file = str(tiny_model / "model.safetensors")
    own_kb = [kb for path, kb in _own_pages(Path("/proc/self/smaps")) if path == file]
    assert own_kb
    assert sum(own_kb) == 0


def _own_pages(smaps: Path) -> Iterator[tuple[str, int]]:
    """Each mapping's file, and the kB of it that were written."""
    file = ""
    for line in smaps.read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            file = words[5] if len(words) > 5 else ""
        elif words[0] == "Private_Dirty:":
            yield file, int(words[1])
