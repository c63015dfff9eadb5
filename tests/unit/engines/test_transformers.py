"""The engine with real models: one bad request harms no one, and company changes nothing."""

from __future__ import annotations

import json
import math
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
from transformers.generation.continuous_batching import continuous_api

from servekit.engines.base import Job
from servekit.engines.continuous import ContinuousRunner
from servekit.engines.static import StaticRunner
from servekit.engines.transformers import TransformersEngine
from servekit.errors import ContextLengthExceeded, EngineFailed, LoadError, RequestError
from servekit.wire.messages import ChatMessage, SamplingParams
from tests.unit.engines.harness import Harness, byte_level_tokenizer, make_spec

PROMPTS = [
    "The quick brown fox",
    "def f(x): return",
    "Größe, naïve café",
    "1234567890 1234567890 1234567890",
    "jumps over the lazy dog. " * 8,
]
Make = Callable[..., Harness]


def reference(folder: Path, prompts: list[str], count: int) -> list[list[int]]:
    """What the library's own `generate` says, greedily, each prompt alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Harness.tokenizer(folder)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        whole = model.generate(
            **ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(whole[0, ids["input_ids"].shape[1] :].tolist())
    return answers


# ---------------------------------------------------------------- the text is right


@pytest.fixture(scope="module", params=["continuous", "static"])
def either(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    """The tiny model in both ways of running it."""
    engine = Harness(make_spec(tiny_model, options={"batching": request.param}))
    yield engine
    engine.close()


def test_the_model_says_what_it_is(either: Harness) -> None:
    info = either.info
    continuous = "continuous" in info.detail
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert (info.max_context, info.chat) == (512, True)
    assert info.slots == (32 if continuous else 1)
    assert (info.kv_cache_bytes > 0) == continuous
    assert info.parameters > 50_000
    loads = [progress for progress in either.progress if progress.phase == "load"]
    assert loads and loads[-1].done == loads[-1].total > 0


def test_greedy_is_what_generate_says(either: Harness, tiny_model: Path) -> None:
    expected = reference(tiny_model, PROMPTS, 24)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert either.generate(prompt, max_tokens=24, ignore_eos=True) == answer


def test_greedy_is_the_same_among_sampled_neighbours(either: Harness, tiny_model: Path) -> None:
    expected = reference(tiny_model, PROMPTS, 24)
    jobs = []
    for seed, prompt in enumerate(PROMPTS):
        jobs.append(either.submit(prompt, max_tokens=24, ignore_eos=True))
        either.submit(prompt, temperature=1.5, top_p=0.9, seed=seed, frequency_penalty=0.5)
    assert [either.tokens(job) for job in jobs] == expected


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(either: Harness) -> None:
    params: dict[str, Any] = {
        "temperature": 0.9,
        "top_k": 50,
        "seed": 42,
        "max_tokens": 20,
        "ignore_eos": True,
    }
    alone = [either.generate(prompt, **params) for prompt in PROMPTS]
    crowd = [either.submit(prompt, **params) for prompt in PROMPTS]
    other = either.submit(PROMPTS[0], **params | {"seed": 43})
    assert [either.tokens(job) for job in crowd] == alone
    assert either.tokens(other) != alone[0]


def test_one_emission_per_step(either: Harness) -> None:
    before = len(either.batches)
    jobs = [either.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS[:3]]
    for job in jobs:
        either.tokens(job)
    for batch in either.batches[before:]:
        ids = [output.id for output in batch]
        assert len(set(ids)) == len(ids)
        assert all(len(output.token_ids) == 1 for output in batch)


@pytest.mark.parametrize("split", [1, 7, 23])
def test_continuing_gives_the_undisturbed_text(either: Harness, split: int) -> None:
    greedy = {"max_tokens": 24, "ignore_eos": True}
    sampled = greedy | {
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
    }
    for params in (greedy, sampled):
        whole = either.generate(PROMPTS[0], **params)
        rest = either.submit(PROMPTS[0], emitted=whole[:split], **params)
        assert either.tokens(rest) == whole[split:]
        assert either.finish(rest) == "length"


def test_continuing_what_is_already_complete_just_ends(either: Harness) -> None:
    whole = either.generate(PROMPTS[0], max_tokens=5, ignore_eos=True)
    job = either.submit(PROMPTS[0], emitted=whole, max_tokens=5)
    assert either.tokens(job) == []
    assert either.finish(job) == "length"


def test_the_end_of_sequence_stops_and_is_not_emitted(either: Harness) -> None:
    """Penalise everything that has been said until the end is all that is left to say."""
    job = either.submit(PROMPTS[0], max_tokens=480, temperature=1.0, seed=3, frequency_penalty=2.0)
    tokens = either.tokens(job)
    assert either.finish(job) == "stop"
    assert not set(tokens) & either.engine._eos
    longer = either.submit(
        PROMPTS[0],
        max_tokens=480,
        temperature=1.0,
        seed=3,
        frequency_penalty=2.0,
        min_tokens=len(tokens) + 5,
    )
    assert len(either.tokens(longer)) >= len(tokens) + 5
    ignoring = either.submit(
        PROMPTS[0],
        max_tokens=len(tokens) + 20,
        temperature=1.0,
        seed=3,
        frequency_penalty=2.0,
        ignore_eos=True,
    )
    assert len(either.tokens(ignoring)) == len(tokens) + 20


def test_penalties_keep_a_row_from_repeating_itself(either: Harness) -> None:
    plain = either.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    fresh = either.generate(
        PROMPTS[0], max_tokens=60, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0
    )
    assert len(set(fresh)) > len(set(plain))


def test_a_prompt_longer_than_one_batch_is_read_in_chunks(harness: Make, tiny_model: Path) -> None:
    long = "jumps over the lazy dog. " * 12
    for batching in ("continuous", "static"):
        one = harness(options={"max_batch_tokens": 16, "batching": batching})
        expected = reference(tiny_model, [long], 8)
        assert [one.generate(long, max_tokens=8, ignore_eos=True)] == expected


# ---------------------------------------------------------------- what killed the loop


BAD_PARAMS: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": math.nan, "temperature": 1.0}),
    ("min_p", {"min_p": 2.0}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": None}),
]


@pytest.mark.parametrize(("param", "params"), BAD_PARAMS)
def test_absurd_parameters_are_refused(either: Harness, param: str, params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        either.submit(PROMPTS[0], **params)
    assert caught.value.param == param
    assert_alive(either)


def test_temperature_zero_is_greedy(either: Harness) -> None:
    assert either.generate(PROMPTS[0], temperature=0.0) == either.generate(
        PROMPTS[0], temperature=1e-9, seed=1
    )
    assert_alive(either)


def test_top_k_above_the_vocabulary_keeps_every_token(either: Harness) -> None:
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 8, "ignore_eos": True}
    everything = either.generate(PROMPTS[0], top_k=10**9, **params)
    assert everything == either.generate(PROMPTS[0], top_k=0, **params)
    assert_alive(either)


def test_an_empty_prompt_is_refused(either: Harness) -> None:
    with pytest.raises(RequestError, match="empty"):
        either.submit([])
    assert_alive(either)


@pytest.mark.parametrize("token", [-1, 10**6, 2**70])
def test_a_token_id_out_of_range_is_refused(either: Harness, token: int) -> None:
    with pytest.raises(RequestError, match=str(token)):
        either.submit([1, token, 2])
    with pytest.raises(RequestError, match=str(token)):
        either.submit([1, 2], emitted=[token])
    assert_alive(either)


def test_a_prompt_beyond_the_context_is_refused(either: Harness) -> None:
    with pytest.raises(ContextLengthExceeded, match="600 tokens"):
        either.submit([5] * 600, max_tokens=1)
    with pytest.raises(ContextLengthExceeded):
        either.submit([5] * 512, max_tokens=1)
    assert_alive(either)


def test_prompt_and_completion_beyond_the_context_are_refused(either: Harness) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        either.submit([5] * 500, max_tokens=13)
    assert caught.value.param == "max_tokens"
    assert len(either.generate([5] * 500, max_tokens=12, ignore_eos=True)) == 12
    assert_alive(either)


def test_an_id_in_flight_twice_is_refused(either: Harness) -> None:
    job = Job(10**6, [5, 6], SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    either.engine.submit(job)
    with pytest.raises(RequestError, match="in flight"):
        either.engine.submit(job)
    either.engine.cancel(job.id)
    either.engine.submit(job)  # a cancelled id may come again at once
    either.engine.cancel(job.id)
    assert_alive(either)


def assert_alive(harness: Harness) -> None:
    """The loop lives on and serves the next request."""
    assert len(harness.generate(PROMPTS[1], max_tokens=3, ignore_eos=True)) == 3
    assert harness.engine.fatal is None


# ---------------------------------------------------------------- cancelling


def test_cancelling_frees_the_slot_and_says_no_more(harness: Make) -> None:
    one = harness(options={"slots": 1})
    first = one.submit(PROMPTS[0], max_tokens=400, ignore_eos=True)
    second = one.submit(PROMPTS[1], max_tokens=4, ignore_eos=True)
    one.until(lambda: first in one.outputs, "the first job has a token")
    one.engine.cancel(first)
    said = len(one.outputs[first])
    assert len(one.tokens(second)) == 4
    assert len(one.outputs[first]) == said
    one.until_idle()
    assert one.engine.load_now().running == 0
    runner = one.engine._runner
    assert isinstance(runner, ContinuousRunner)
    assert not runner._processor.scheduler.active_requests


def test_cancelling_while_waiting_and_before_the_first_step(either: Harness) -> None:
    jobs = [either.submit(PROMPTS[0], max_tokens=300, ignore_eos=True) for _ in range(40)]
    for job in jobs:
        either.engine.cancel(job)
    said = {job: len(either.outputs.get(job, [])) for job in jobs}
    assert_alive(either)
    assert {job: len(either.outputs.get(job, [])) for job in jobs} == said
    either.until_idle()
    assert either.engine.load_now().progress_age_s == 0


def test_unknown_ids_are_ignored(either: Harness) -> None:
    either.engine.cancel(123456789)
    assert_alive(either)


def test_cancelling_and_submitting_at_random(either: Harness) -> None:
    """Requests come and go from several threads; whoever is not cancelled gets its own text."""
    expected = either.generate(PROMPTS[0], max_tokens=30, ignore_eos=True)
    kept: list[int] = []
    lock = threading.Lock()

    def visit(number: int) -> None:
        for turn in range(5):
            with lock:
                job = either.submit(PROMPTS[0], max_tokens=30, ignore_eos=True)
            if (number + turn) % 2:
                either.engine.cancel(job)
            else:
                kept.append(job)

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [either.tokens(job) for job in kept] == [expected] * len(kept)


def test_closing_with_work_in_flight_returns(harness: Make) -> None:
    one = harness()
    jobs = [one.submit(PROMPTS[0], max_tokens=400, ignore_eos=True) for _ in range(8)]
    one.until(lambda: jobs[-1] in one.outputs, "all are running")
    one.close()
    with pytest.raises(EngineFailed):
        one.submit(PROMPTS[0])


# ---------------------------------------------------------------- the cache is too small for all


#: Bytes of one cached token of the tiny model: 2 layers, keys and values, 2 heads of 16 floats.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


def test_the_cache_caps_the_context(harness: Make) -> None:
    one = harness(options={"kv_cache_bytes": 100 * TOKEN_BYTES, "block_size": 16})
    assert 64 <= one.info.max_context <= 100
    prompt = [5] * (one.info.max_context - 8)
    with pytest.raises(ContextLengthExceeded):
        one.submit(prompt, max_tokens=9)
    assert len(one.generate(prompt, max_tokens=8, ignore_eos=True)) == 8
    assert_alive(one)


def test_requests_that_outgrow_the_cache_together_all_end_right(
    harness: Make, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fit when they are admitted, and not when they end; one is taken out and run again."""
    one = harness(options={"kv_cache_bytes": 288 * TOKEN_BYTES, "block_size": 16})
    runner = one.engine._runner
    assert isinstance(runner, ContinuousRunner)
    offloading = runner._processor.offloading_manager
    offload = offloading.offload_requests
    taken_out: list[Any] = []

    def counted() -> Any:
        taken_out.append(offload())
        return taken_out[-1]

    monkeypatch.setattr(offloading, "offload_requests", counted)
    prompts = [f"{number} jumps over the lazy dog" for number in range(6)]
    expected = reference(tiny_model, prompts, 200)
    jobs = [one.submit(prompt, max_tokens=200, ignore_eos=True) for prompt in prompts]
    assert [one.tokens(job) for job in jobs] == expected
    assert any(taken_out)
    assert_alive(one)


def test_cancelling_the_only_runner_lets_those_taken_out_back_in(harness: Make) -> None:
    """The library lifts its block on new requests only when one finishes."""
    one = harness(options={"kv_cache_bytes": 288 * TOKEN_BYTES, "block_size": 16})
    runner = one.engine._runner
    assert isinstance(runner, ContinuousRunner)
    jobs = [one.submit(f"{n} jumps", max_tokens=250, ignore_eos=True) for n in range(2)]
    scheduler = runner._processor.scheduler
    one.until_true(lambda: scheduler.block_new_requests)
    running = list(scheduler.active_requests)
    assert len(running) == 1
    stays = next(job for job in jobs if not running[0].startswith(f"{job}#"))
    one.engine.cancel(next(job for job in jobs if job != stays))
    assert len(one.tokens(stays)) == 250


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_in_a_cache_for_one_never_gets_stuck(harness: Make, seed: int) -> None:
    """Shared prefixes, lengths up to the whole cache, and cancellations, all at random."""
    source = random.Random(seed)
    one = harness(
        options={"kv_cache_bytes": 288 * TOKEN_BYTES, "block_size": 16, "max_batch_tokens": 40}
    )
    limit = one.info.max_context
    wanted: dict[int, int] = {}
    for _ in range(60):
        prompt = [source.randrange(3, 6)] * source.randrange(1, 150)
        count = source.randrange(1, limit - len(prompt) + 1)
        job = one.submit(prompt, max_tokens=count, ignore_eos=True)
        wanted[job] = count
        if source.random() < 0.4:
            dropped = source.choice(list(wanted))
            one.engine.cancel(dropped)
            del wanted[dropped]
    assert {job: len(one.tokens(job)) for job in wanted} == wanted
    assert_alive(one)


# ---------------------------------------------------------------- when the loop dies all the same


def test_a_dead_loop_fails_what_is_in_flight_and_takes_no_more(
    harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness()
    assert one.engine.fatal is None
    jobs = [one.submit(PROMPTS[0], max_tokens=400, ignore_eos=True) for _ in range(3)]
    one.until(lambda: jobs[-1] in one.outputs, "all are running")

    def broken() -> Any:
        raise RuntimeError("the GPU has fallen off the bus")

    monkeypatch.setattr(one.engine._runner, "step", broken)
    one.until(lambda: all(one.ended(job) for job in jobs), "all have failed")
    for job in jobs:
        assert "fallen off the bus" in str(one.outputs[job][-1].error)
    assert isinstance(one.engine.fatal, RuntimeError)
    with pytest.raises(EngineFailed):
        one.submit(PROMPTS[0])


def test_a_stall_shows_in_the_age_of_progress(
    harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness()
    assert one.engine.load_now().progress_age_s == 0
    go = threading.Event()
    step = one.engine._runner.step

    def stalled() -> Any:
        go.wait()
        return step()

    monkeypatch.setattr(one.engine._runner, "step", stalled)
    job = one.submit(PROMPTS[0], max_tokens=2, ignore_eos=True)
    first = one.engine.load_now().progress_age_s
    one.until_true(lambda: one.engine.load_now().progress_age_s > first + 0.05)
    go.set()
    one.tokens(job)
    one.until_idle()
    assert one.engine.load_now().progress_age_s == 0


# ---------------------------------------------------------------- other ways to run


def test_no_flash_kernel_is_looked_for(harness: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the `kernels` package is installed, looking would ask the hub."""

    def asked(**_: object) -> bool:
        raise AssertionError("a flash kernel was looked for")

    for version in (2, 3):
        monkeypatch.setattr(continuous_api, f"is_flash_attn_{version}_available", asked)
    one = harness(options={"batching": "continuous"})
    assert_alive(one)


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


def test_a_cache_that_does_not_fit(tiny_model: Path) -> None:
    error = refused(tiny_model, options={"kv_cache_bytes": 2**50})
    assert "kv_cache_bytes" in str(error)
    assert not error.permanent


# ---------------------------------------------------------------- SmolLM2


@pytest.mark.model
def test_smollm2_greedy_is_what_generate_says_even_in_a_crowd(smol: Harness, smollm2: Path) -> None:
    prompts = ["The capital of France is", "Once upon a time", "Water boils at", "1, 2, 3, 5, 8,"]
    expected = reference(smollm2, prompts, 20)
    assert [smol.generate(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts] == expected
    jobs = []
    for seed, prompt in enumerate(prompts):
        jobs.append(smol.submit(prompt, max_tokens=20, ignore_eos=True))
        smol.submit(prompt, max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
    assert [smol.tokens(job) for job in jobs] == expected


@pytest.mark.model
def test_smollm2_seeded_and_continued(smol: Harness) -> None:
    params: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 11,
        "max_tokens": 24,
        "ignore_eos": True,
    }
    whole = smol.generate("Once upon a time", **params)
    crowd = [smol.submit("Once upon a time", **params | {"seed": seed}) for seed in range(9, 14)]
    answers = [smol.tokens(job) for job in crowd]
    assert answers[2] == whole
    assert len({tuple(answer) for answer in answers}) == 5
    rest = smol.submit("Once upon a time", emitted=whole[:9], **params)
    assert smol.tokens(rest) == whole[9:]


@pytest.mark.model
def test_smollm2_chats(smol: Harness) -> None:
    question = ChatMessage("user", "What is the capital of France? Answer in one word.")
    job = smol.submit(smol.engine.codec.render_chat([question]), max_tokens=60)
    decoder = smol.engine.codec.decoder()
    answer = decoder.push(smol.tokens(job)) + decoder.flush()
    assert "Paris" in answer
    assert smol.finish(job) == "stop"


@pytest.mark.model
def test_smollm2_one_at_a_time_says_the_same(smol: Harness, harness: Make, smollm2: Path) -> None:
    static = harness(smollm2, options={"batching": "static"})
    expected = smol.generate("The capital of France is", max_tokens=16, ignore_eos=True)
    jobs = [
        static.submit("The capital of France is", max_tokens=16, ignore_eos=True) for _ in range(2)
    ]
    assert [static.tokens(job) for job in jobs] == [expected, expected]
