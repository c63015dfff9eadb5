"""The llama.cpp engine over a tiny random model: what it promises of a request, alone and beside
others.

Weights and cache are float32, and random logits rarely tie, so that texts are equal token by token
although llama.cpp computes a batch in another order than a single sequence.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servekit.engines.api.base import EmbedJob, Job
from servekit.engines.llamacpp import memory_fit
from servekit.errors import ContextLengthExceeded, EngineFailed, RequestError, Unsupported
from servekit.model_metadata.gguf import SAMPLING
from servekit.protocol.messages import ChatMessage, Grammar, SamplingParams
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import PROMPTS, TEMPLATE, Harness
from tests.unit.engines.origins import write_tiny_gguf

Make = Callable[..., Harness]

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
]


def prompts(count: int = 8) -> list[list[int]]:
    drawn = random.Random(3)
    return [[drawn.randrange(3, 250) for _ in range(drawn.randrange(1, 90))] for _ in range(count)]


# ---------------------------------------------------------------- the same text


@pytest.mark.parametrize("params", [{}, *({"seed": 11, **one} for one in SAMPLED)])
def test_a_text_is_the_same_alone_and_in_a_crowd(gguf_engine: Harness, params: Any) -> None:
    wanted: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, **params}
    alone = [gguf_engine.generate(prompt, **wanted) for prompt in prompts()]
    jobs = [gguf_engine.submit(prompt, **wanted) for prompt in prompts()]
    assert [gguf_engine.tokens(job) for job in jobs] == alone
    assert max(len(batch) for batch in gguf_engine.batches) == 8  # they did share steps


@pytest.mark.parametrize("params", [{}, *({"seed": -5, **one} for one in SAMPLED)])
def test_it_goes_on_after_tokens_of_another_worker(
    gguf_engine: Harness, gguf: Make, params: Any
) -> None:
    prompt = gguf_engine.engine.codec.encode(PROMPTS[4])
    wanted: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, **params}
    whole = gguf_engine.generate(prompt, **wanted)
    other = gguf()
    for cut in (1, 2, 7, 13, 19):
        assert other.tokens(other.submit(prompt, whole[:cut], **wanted)) == whole[cut:]
    done = other.submit(prompt, whole, **wanted)
    assert other.tokens(done) == []
    assert other.finish(done) == "length"


def test_seeds_repeat_and_differ(gguf_engine: Harness) -> None:
    def text(seed: int | None) -> list[int]:
        return gguf_engine.generate([7], seed=seed, temperature=1.5, ignore_eos=True)

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in (1, 2, -3, 2**62, None, None)}) == 6


def test_a_prompt_is_read_once(gguf: Make) -> None:
    one = gguf()
    prompt = prompts()[0] * 2
    read = counted(one)
    first = one.generate(prompt, max_tokens=4, ignore_eos=True)
    assert sum(read()) == len(prompt) + 3
    assert one.generate(prompt, max_tokens=4, ignore_eos=True) == first
    assert sum(read()) == 1 + 3
    job = one.submit(prompt, max_tokens=4, ignore_eos=True)
    one.tokens(job)
    assert one.outputs[job][-1].cached_tokens == len(prompt) - 1
    read()
    longer = one.generate([*prompt, *first, 9], max_tokens=4, ignore_eos=True)
    assert sum(read()) <= 2 + 3
    assert longer == gguf().generate([*prompt, *first, 9], max_tokens=4, ignore_eos=True)


@pytest.fixture
def sliding(tmp_path: Path) -> Iterator[Make]:
    """Make engines over a model of which every second layer looks back on 16 tokens."""
    path = tmp_path / "sliding.gguf"
    window: dict[str, Any] = {"gemma2__attention__sliding_window": 16}
    write_tiny_gguf(path, architecture="gemma2", float32=True, context=1024, **window)
    made: list[Harness] = []

    def make(options: dict[str, Any] | None = None, **fields: Any) -> Harness:
        small = {"slots": 4, "batch_tokens": 32}  # so that a window's own cache is small, too
        made.append(llamacpp(path, small | (options or {}), **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_prompt_is_read_once_by_a_model_with_a_sliding_window(sliding: Make) -> None:
    one = sliding()
    assert one.engine._loaded.model.window == 16
    prompt = random.Random(5).choices(range(3, 250), k=800)
    read = counted(one)
    first = one.generate(prompt, max_tokens=60, ignore_eos=True)
    assert sum(read()) == len(prompt) + 59
    for _ in range(2):
        job = one.submit(prompt, max_tokens=60, ignore_eos=True)
        assert one.tokens(job) == first
        assert sum(read()) == 1 + 59
        assert {output.cached_tokens for output in one.outputs[job]} == {len(prompt) - 1}
    for cut in (799, 200, 30, 12):
        other = [*prompt[:cut], 5, 6, 7]
        expected = scores(sliding(), other)
        assert scores(one, other) == expected
        assert sum(read()) == 3 + 7


def scores(harness: Harness, *prompts: list[int]) -> list[list[float]]:
    """How likely the tokens of the answers were. A small model may say the same without the window;
    it is less sure then."""
    jobs = [harness.submit(p, max_tokens=8, ignore_eos=True, logprobs=0) for p in prompts]
    for job in jobs:
        harness.tokens(job)
    found = [harness.logprobs(job) for job in jobs]
    return [[round(one.logprob, 2) for one in each] for each in found]


@pytest.mark.lane("long")
def test_sliding_windows_say_the_same_in_a_full_cache(
    sliding: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share beginnings, in a cache that has room for a few of them: what a window
    has given up is never taken for what is still there."""
    drawn = random.Random(8)
    trunk = drawn.choices(range(3, 250), k=500)
    ends = [drawn.choices(range(3, 250), k=drawn.randrange(1, 300)) for _ in range(24)]
    asked = [[*trunk[: drawn.randrange(500)], *end] for end in ends]
    expected = []
    for prompt in asked:
        fresh = sliding({"slots": 1})
        expected += scores(fresh, prompt)
        fresh.close()
    monkeypatch.setattr(memory_fit, "HOST_TOKENS_PER_SLOT", 16)
    tight = sliding(max_context=900)
    assert tight.engine._runner._context.capacity == 1024
    assert scores(tight, *asked) == expected


def test_a_prompt_is_read_once_for_each_salt(gguf: Make) -> None:
    one = gguf()
    prompt = prompts()[0] * 2
    read = counted(one)
    for salt, already in (("", 0), ("a", 0), ("b", 0), ("a", len(prompt) - 1)):
        job = one.submit(prompt, cache_salt=salt, max_tokens=4, ignore_eos=True)
        assert len(one.tokens(job)) == 4
        assert sum(read()) == len(prompt) - already + 3, salt


def test_a_prompt_that_is_being_answered_is_shared(gguf: Make) -> None:
    one = gguf()
    read = counted(one)
    prompt = prompts()[0] * 2
    long = one.submit(prompt, max_tokens=100, ignore_eos=True)
    one.until(lambda: long in one.outputs, "the first has a token")
    read()
    branch = [*prompt[:-4], 5, 6, 7]
    answer = one.generate(branch, max_tokens=1)
    assert answer == gguf().generate(branch, max_tokens=1)
    one.engine.cancel(long)
    one.until_idle()
    assert max(read()) == 3  # all that is its own


def counted(harness: Harness) -> Callable[[], list[int]]:
    """How many tokens llama.cpp is given at a time, from the last call on."""
    context = harness.engine._runner._context
    put = context.put
    sizes: list[int] = []

    def counting(sequence: int, start: int, ids: list[int], **wanted: bool) -> int:
        sizes.append(len(ids))
        return int(put(sequence, start, ids, **wanted))

    context.put = counting

    def since() -> list[int]:
        found = sizes[:]
        sizes.clear()
        return found

    return since


def test_what_does_not_fit_waits_and_says_the_same(
    gguf: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    roomy = gguf()
    expected = [roomy.generate(prompt[:20], **wanted) for prompt in prompts()]
    monkeypatch.setattr(memory_fit, "HOST_TOKENS_PER_SLOT", 16)
    tight = gguf()
    assert tight.engine._runner._context.capacity == 256  # 8 × 120 tokens are wanted
    jobs = [tight.submit(prompt[:20], **wanted) for prompt in prompts()]
    assert [tight.tokens(job) for job in jobs] == expected
    tight.until_idle()
    assert tight.engine.load_now().kv_used == 0.0


# ---------------------------------------------------------------- parameters


def test_log_probabilities_are_the_models_own(gguf_engine: Harness) -> None:
    job = gguf_engine.submit([5, 6, 7], logprobs=4, max_tokens=6, ignore_eos=True)
    plain = gguf_engine.generate([5, 6, 7], max_tokens=6, ignore_eos=True)
    assert gguf_engine.tokens(job) == plain
    piece = gguf_engine.engine._loaded.model.vocabulary.piece
    for token, one in zip(plain, gguf_engine.logprobs(job), strict=True):
        assert (one.token, one.logprob) == one.best[0] == (piece(token), one.logprob)
        assert len(one.best) == 4
        values = [value for _, value in one.best]
        assert values == sorted(values, reverse=True)
        assert np.exp(values).sum() <= 1.0
    everything = gguf_engine.logprobs(gguf_engine.submit([5], logprobs=261, max_tokens=1))[0]
    assert np.exp([value for _, value in everything.best]).sum() == pytest.approx(1.0, abs=1e-4)


def test_a_bias_forces_and_forbids(gguf_engine: Harness) -> None:
    forced = gguf_engine.generate([5], logit_bias=((77, 100.0),), max_tokens=4)
    assert forced == [77] * 4
    plain = gguf_engine.generate([5], max_tokens=4, ignore_eos=True)
    barred = gguf_engine.generate(
        [5], logit_bias=tuple((t, -100.0) for t in plain), max_tokens=4, ignore_eos=True
    )
    assert not set(barred) & set(plain)


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 0.9), (-1.0, 1.5)])
def test_penalties_count_the_completion(
    gguf_engine: Harness, presence: float, frequency: float
) -> None:
    """Each token is the best once what was said before is lowered."""
    job = gguf_engine.submit(
        *([5, 77],),
        presence_penalty=presence,
        frequency_penalty=frequency,
        logprobs=261,
        max_tokens=30,
        ignore_eos=True,
        logit_bias=((77, 9.0), (78, 8.5)),
    )
    said = gguf_engine.tokens(job)
    id_of = {gguf_engine.engine._loaded.model.vocabulary.piece(t): t for t in range(261)}
    for at, scores in enumerate(gguf_engine.logprobs(job)):
        adjusted = {id_of[piece]: value for piece, value in scores.best}
        adjusted[77] += 9.0
        adjusted[78] += 8.5
        for token in set(said[:at]):
            adjusted[token] -= presence + frequency * said[:at].count(token)
        assert said[at] == max(adjusted, key=lambda token: adjusted[token])
    assert said.count(77) > 1


def test_a_repetition_penalty_counts_the_prompt_too(gguf_engine: Harness) -> None:
    plain = gguf_engine.generate([5, 6], max_tokens=1, ignore_eos=True)
    again = [5, 6, *plain * 3]
    punished = gguf_engine.generate(again, repetition_penalty=1e5, max_tokens=1, ignore_eos=True)
    assert punished[0] not in again


def test_min_p_of_one_is_greedy(gguf_engine: Harness) -> None:
    greedy = gguf_engine.generate([5], ignore_eos=True)
    drawn = gguf_engine.generate([5], temperature=2.0, min_p=1.0, ignore_eos=True)
    assert drawn == greedy


def test_the_end_of_sequence_waits_for_min_tokens(gguf_engine: Harness) -> None:
    eos = 2
    assert eos in gguf_engine.engine._eos
    others = gguf_engine.engine._eos - {eos}
    bias = ((eos, 100.0), *((other, -100.0) for other in others))
    at_once = gguf_engine.submit([5], logit_bias=bias)
    assert gguf_engine.tokens(at_once) == []
    assert gguf_engine.finish(at_once) == "stop"
    later = gguf_engine.submit([5], logit_bias=bias, min_tokens=5)
    assert len(gguf_engine.tokens(later)) == 5
    assert gguf_engine.finish(later) == "stop"
    ignored = gguf_engine.submit([5], logit_bias=bias, ignore_eos=True, max_tokens=7)
    assert gguf_engine.tokens(ignored) == [eos] * 7
    assert gguf_engine.finish(ignored) == "length"


def test_sampling_of_the_file_and_the_configuration(gguf: Make) -> None:
    by_file = gguf(general__sampling__temp=0.0, general__sampling__top_k=7)
    assert by_file.engine._defaults == {**SAMPLING, "temperature": 0.0, "top_k": 7}
    assert by_file.generate([5], temperature=None) == by_file.generate([5])
    stated = gguf(general__sampling__top_k=7, sampling={"top_k": 3})
    assert stated.engine._defaults == {**SAMPLING, "top_k": 3}
    off = gguf(general__sampling__top_k=-1)
    assert len(off.generate([5], temperature=None, seed=1, ignore_eos=True, max_tokens=5)) == 5


# ---------------------------------------------------------------- grammars

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}, "on": {"type": "boolean"}},
        "required": ["n", "on"],
        "additionalProperties": False,
    }
)


def test_a_schema_holds_whatever_the_weights_say(gguf_engine: Harness) -> None:
    grammar = Grammar("json_schema", SCHEMA)
    for seed in range(4):
        job = gguf_engine.submit(
            PROMPTS[0], grammar=grammar, temperature=1.0, seed=seed, max_tokens=200
        )
        found = json.loads(gguf_engine.text(job))
        assert found["n"] <= 99
        assert isinstance(found["on"], bool)
        assert gguf_engine.finish(job) == "stop"


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[ab]{3}-(one|two)"), r"[ab]{3}-(one|two)"),
        (Grammar("lark", 'start: "x" NUMBER "y"\nNUMBER: /[0-9]{2,4}/'), r"x\d{2,4}y"),
    ],
)
def test_a_grammar_goes_on_in_another_worker(
    gguf_engine: Harness, gguf: Make, grammar: Grammar, pattern: str
) -> None:
    wanted: dict[str, Any] = {"grammar": grammar, "seed": 3, "temperature": 1.0, "max_tokens": 40}
    job = gguf_engine.submit(PROMPTS[1], **wanted)
    whole = gguf_engine.tokens(job)
    assert re.fullmatch(pattern, gguf_engine.text(job))
    other = gguf()
    prompt = other.engine.codec.encode(PROMPTS[1])
    for cut in range(len(whole)):
        assert other.tokens(other.submit(prompt, whole[:cut], **wanted)) == whole[cut:]
    with pytest.raises(RequestError, match="does not match the grammar"):
        other.submit(prompt, [200, 201], **wanted)


# ---------------------------------------------------------------- many clients, and those who go


def test_eight_clients_at_once(gguf_engine: Harness) -> None:
    """Each a thread, that asks again as soon as it is answered."""
    expected = [gguf_engine.generate(p, max_tokens=12, ignore_eos=True) for p in prompts()]
    lock, failures = threading.Lock(), []

    def client(index: int) -> None:
        for turn in range(4):
            which = (index + turn) % 8
            with lock:
                job = gguf_engine.submit(prompts()[which], max_tokens=12, ignore_eos=True)
            if gguf_engine.tokens(job) != expected[which]:
                failures.append((index, turn))

    threads = [threading.Thread(target=client, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    gguf_engine.until_idle()


def slow_down(one: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a request ends while the test's thread waits for a core."""
    context = one.engine._runner._context
    run = context.decode_batch

    def run_slowly(*args: Any) -> Any:
        time.sleep(0.02)
        return run(*args)

    monkeypatch.setattr(context, "decode_batch", run_slowly)


def test_cancelling_frees_the_slot_and_says_no_more(
    gguf: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = gguf(options={"slots": 1})
    slow_down(one, monkeypatch)
    first = one.submit(PROMPTS[0], max_tokens=200, ignore_eos=True)
    waits = one.submit(PROMPTS[2], max_tokens=200, ignore_eos=True)
    last = one.submit(PROMPTS[1], max_tokens=4, ignore_eos=True)
    one.until(lambda: first in one.outputs, "the first has a token")
    load = one.engine.load_now()
    assert (load.running, load.waiting) == (1, 2)
    assert load.progress_age_s < 5
    one.engine.cancel(waits)
    one.engine.cancel(first)
    one.engine.cancel(12345)
    steps, said = one.count_steps(), len(one.outputs[first])
    assert len(one.tokens(last)) == 4
    assert len(one.outputs[first]) == said
    assert steps() < 50, "the slot was free at once"
    assert waits not in one.outputs
    one.until_idle()
    load = one.engine.load_now()
    assert (load.running, load.waiting, load.progress_age_s) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("temperature", {"temperature": float("nan")}),
        ("max_tokens", {"max_tokens": None}),
        ("logit_bias", {"logit_bias": ((10**6, 1.0),)}),
    ],
)
def test_absurd_parameters_are_refused(gguf_engine: Harness, param: str, params: Any) -> None:
    with pytest.raises(RequestError) as caught:
        gguf_engine.submit(PROMPTS[0], **params)
    assert caught.value.param == param


def test_prompts_that_cannot_be_run_are_refused(gguf_engine: Harness) -> None:
    with pytest.raises(RequestError, match="empty"):
        gguf_engine.submit([])
    with pytest.raises(RequestError, match="vocabulary"):
        gguf_engine.submit([261])
    with pytest.raises(ContextLengthExceeded):
        gguf_engine.submit([5] * 250, max_tokens=7)
    assert len(gguf_engine.generate([5] * 250, max_tokens=6, ignore_eos=True)) == 6
    with pytest.raises(Unsupported, match=r"options\.pooling"):
        gguf_engine.engine.embed(EmbedJob(1, [[5]]))


def test_an_id_in_flight_twice_is_refused(
    gguf_engine: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(gguf_engine, monkeypatch)
    job = Job(10**6, [5, 6], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    gguf_engine.engine.submit(job)
    with pytest.raises(RequestError, match="in flight"):
        gguf_engine.engine.submit(job)
    gguf_engine.engine.cancel(job.id)
    gguf_engine.engine.submit(job)  # a cancelled id may come again at once
    gguf_engine.engine.cancel(job.id)


def test_a_loop_that_fails_says_so_at_once(gguf: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = gguf()
    slow_down(one, monkeypatch)
    running = one.submit(PROMPTS[0], max_tokens=200, ignore_eos=True)
    one.until(lambda: running in one.outputs, "it runs")

    def broken() -> None:
        raise RuntimeError("llama.cpp failed with code -3: out of luck")

    died = threading.Event()
    one.engine.on_death = died.set
    monkeypatch.setattr(one.engine._runner._context, "decode_batch", broken)
    assert died.wait(60)
    assert isinstance(one.engine.fatal, RuntimeError) and "out of luck" in str(one.engine.fatal)
    assert not one.ended(running), "it goes on in another worker"
    with pytest.raises(EngineFailed):
        one.submit(PROMPTS[0])


# ---------------------------------------------------------------- a chat template of one's own


@pytest.mark.parametrize("template", ["", TEMPLATE])
def test_the_files_own_template_gives_way(tmp_path: Path, template: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", float32=True, template=template)
    engine = llamacpp(path)
    assert engine.info.chat is bool(template)
    engine.close()
    engine = llamacpp(path, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert engine.info.chat and "forced_tools" in engine.info.serves
    codec = engine.engine.codec
    found = codec.render_chat([ChatMessage("user", "abc")])
    assert found == codec.encode("[abc]")
    engine.close()
