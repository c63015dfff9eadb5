"""What `engines.base` promises, asked of every engine that is installed.

    pytest tests/unit/engines/contract -k echo

On a machine that has little but torch and the engine: `pytest -c /dev/null --rootdir=. …`. vLLM
keeps it without a GPU, too: `python -m tests.vllm_cpu --only contract`.
"""

from __future__ import annotations

import array
import contextlib
import os
import threading
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from servekit.engines.api.base import Job
from servekit.errors import RequestError, Unsupported
from servekit.protocol.messages import Capability, ChatMessage, Grammar, SamplingParams
from tests.polling import poll
from tests.unit.engines.contract.running import Running
from tests.unit.engines.contract.subjects import Subject

PROMPT = "The quick brown fox"
OTHERS = ["The lazy dog", "The small cat looks", "1234567890", "Größe, naïve café", "jumps " * 20]
#: Enough that an end of its own, where there is one, comes before.
LONG = 200

Params = dict[str, Any]


def needs(engine: Running, *capabilities: Capability) -> None:
    if lacking := set(capabilities) - set(engine.info.serves):
        pytest.skip(f"it does not serve {', '.join(sorted(lacking))}")


@pytest.fixture(scope="module")
def reference(shared: Running) -> list[int]:
    """What it says to PROMPT, undisturbed."""
    return shared.generate(PROMPT, max_tokens=24, ignore_eos=True)


@cache
def ending(engine: Running) -> tuple[int, list[int]]:
    """A seed with which it ends by itself, after some tokens and before LONG; and those."""
    params: Params = {"max_tokens": LONG, "temperature": 1.0}
    for seed in range(64):
        job = engine.submit(PROMPT, seed=seed, **params)
        if engine.finish(job) == "stop" and len(tokens := engine.tokens(job)) > 2:
            return seed, tokens
    raise AssertionError("it never ended by itself")


def assert_well(engine: Running, reference: list[int]) -> None:
    """It says what it always said."""
    said = engine.generate(PROMPT, max_tokens=24, ignore_eos=True)
    assert engine.alike(said, reference), said


# ---------------------------------------------------------------- what it says of itself


def test_what_it_is_makes_sense(engine: Running) -> None:
    info = engine.info
    assert info.max_context >= 16
    assert info.slots >= 1
    assert info.architecture and info.dtype and info.device
    assert "generate" in info.serves or "embed" in info.serves
    assert ("embed" in info.serves) == (info.embedding_size > 0)
    assert engine.engine.vocab_size > 0


def test_text_and_tokens_are_two_ways_of_saying_it(engine: Running) -> None:
    codec = engine.engine.codec
    for text in [PROMPT, *OTHERS]:
        ids = codec.encode(text)
        assert all(0 <= token < engine.engine.vocab_size for token in ids)
        assert engine.text(ids).strip() == text.strip()
        decoder = codec.decoder()
        assert "".join(decoder.push([token]) for token in ids) + decoder.flush() == engine.text(ids)


@pytest.mark.parametrize("continues", [False, True])
def test_a_chat_is_rendered_with_all_its_messages(engine: Running, continues: bool) -> None:
    if not engine.info.chat:
        pytest.skip("it has no chat template")
    said = [ChatMessage("user", PROMPT), ChatMessage("assistant", "jumps over")]
    said += [] if continues else [ChatMessage("user", OTHERS[0])]
    ids = engine.engine.codec.render_chat(said, continues=continues)
    assert all(0 <= token < engine.engine.vocab_size for token in ids)
    text = engine.text(ids)
    assert all(message.content in text for message in said)
    assert not continues or text.rstrip().endswith("jumps over")
    engine.generate(ids, max_tokens=3)


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_max_tokens_is_exact(engine: Running, count: int) -> None:
    job = engine.submit(PROMPT, max_tokens=count, ignore_eos=True)
    assert len(engine.tokens(job)) == count
    assert engine.finish(job) == "length"


def test_greedy_repeats_and_a_shorter_answer_is_a_beginning(
    engine: Running, reference: list[int]
) -> None:
    assert_well(engine, reference)
    shorter = engine.generate(PROMPT, max_tokens=9, ignore_eos=True)
    assert engine.alike(shorter, reference[:9]), shorter
    assert all(0 <= token < engine.engine.vocab_size for token in reference)


def test_only_the_last_output_says_how_it_ended(engine: Running) -> None:
    job = engine.submit(PROMPT, max_tokens=40, ignore_eos=True)
    *before, last = engine.finished(job)
    assert last.finish == "length"
    assert all(output.finish is None and output.token_ids for output in before)


def test_an_end_of_its_own_is_stop(engine: Running) -> None:
    seed, tokens = ending(engine)
    job = engine.submit(PROMPT, max_tokens=len(tokens) + 1, temperature=1.0, seed=seed)
    assert (engine.tokens(job), engine.finish(job)) == (tokens, "stop")
    # so the end itself is not among the tokens
    cut = engine.submit(PROMPT, max_tokens=len(tokens), temperature=1.0, seed=seed)
    assert (engine.tokens(cut), engine.finish(cut)) == (tokens, "length")


def test_ignoring_the_end_goes_on(engine: Running) -> None:
    seed, tokens = ending(engine)
    count = len(tokens) + 9
    params: Params = {"max_tokens": count, "temperature": 1.0, "seed": seed}
    job = engine.submit(PROMPT, ignore_eos=True, **params)
    assert (len(engine.tokens(job)), engine.finish(job)) == (count, "length")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_token_that_is_to_end_it_ends_it(
    engine: Running, reference: list[int], ignore_eos: bool
) -> None:
    needs(engine, "stop_token_ids")
    token = reference[5]
    before = reference[: reference.index(token)]
    params: Params = {"max_tokens": 24, "stop_token_ids": (token,), "ignore_eos": ignore_eos}
    job = engine.submit(PROMPT, **params)
    assert engine.alike(engine.tokens(job), before)
    last = engine.finished(job)[-1]
    assert (last.finish, last.stop_token) == ("stop", token)
    if engine.info.resumes and before:
        again = engine.submit(PROMPT, before[:1], **params)
        assert engine.alike(engine.tokens(again), before[1:])


def test_a_token_that_is_not_in_the_vocabulary_cannot_end_it(
    engine: Running, reference: list[int]
) -> None:
    needs(engine, "stop_token_ids")
    with contextlib.suppress(RequestError):
        params: Params = {"stop_token_ids": (2**31 - 1,), "min_tokens": 4}
        assert len(engine.generate(PROMPT, max_tokens=8, **params)) <= 8
    assert_well(engine, reference)


def test_bad_words_never_come(engine: Running, reference: list[int]) -> None:
    needs(engine, "bad_words")
    params: Params = {"max_tokens": 24, "ignore_eos": True}
    [first, second, third] = reference[:3]
    beside = engine.submit(PROMPT, **params)
    assert first not in engine.generate(PROMPT, banned=[(first,)], **params)
    said = engine.generate(PROMPT, banned=[(second, third)], **params)
    assert engine.alike(said[:2], [first, second])
    assert (second, third) not in set(pairwise(said))
    if engine.info.resumes:
        more = engine.generate(PROMPT, emitted=said[:2], banned=[(second, third)], **params)
        assert engine.alike(more, said[2:])
    assert engine.alike(engine.tokens(beside), reference)


def test_the_end_waits_for_min_tokens(engine: Running) -> None:
    seed, tokens = ending(engine)
    least = len(tokens) + 5
    params: Params = {"max_tokens": least + 9, "temperature": 1.0, "seed": seed}
    assert len(engine.generate(PROMPT, min_tokens=least, **params)) >= least


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_a_seed_says_the_same_alone_and_in_a_crowd(engine: Running, seed: int) -> None:
    params: Params = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    alone = engine.generate(PROMPT, seed=seed, **params)
    crowd = [engine.submit(prompt, seed=seed + 1 if seed < 9 else 3, **params) for prompt in OTHERS]
    again = engine.submit(PROMPT, seed=seed, **params)
    crowd += [engine.submit(prompt, **params) for prompt in OTHERS]
    assert engine.alike(engine.tokens(again), alone)
    assert all(len(engine.tokens(job)) == 20 for job in crowd)


def test_one_candidate_is_greedy(engine: Running, reference: list[int]) -> None:
    params: Params = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    assert engine.alike(engine.generate(PROMPT, top_k=1, **params), reference)
    assert engine.alike(engine.generate(PROMPT, top_p=1e-6, **params), reference)
    if "min_p" in engine.info.serves:
        assert engine.alike(engine.generate(PROMPT, min_p=1.0, **params), reference)


def test_a_biased_token_is_all_it_says(engine: Running, reference: list[int]) -> None:
    needs(engine, "logit_bias")
    token = reference[-1]
    said = engine.generate(PROMPT, max_tokens=5, ignore_eos=True, logit_bias=((token, 100.0),))
    assert said == [token] * 5


def test_logprobs_are_of_the_tokens(engine: Running, reference: list[int]) -> None:
    needs(engine, "logprobs")
    for wanted in (0, 3):
        job = engine.submit(PROMPT, max_tokens=24, ignore_eos=True, logprobs=wanted)
        said = engine.tokens(job)
        assert engine.alike(said, reference)
        for output in engine.finished(job):
            assert len(output.logprobs or ()) == len(output.token_ids)
        for one in engine.logprobs(job):
            assert one.logprob <= 0.0
            assert len(one.best) <= wanted
            assert sorted(one.best, key=lambda best: -best[1]) == list(one.best)
            if one.best:  # greedy: it is the best
                assert one.logprob == pytest.approx(one.best[0][1], abs=1e-3)
        told = b"".join(one.token for one in engine.logprobs(job)).decode(errors="replace")
        # a text has nothing of a character that is cut off at its end
        assert told.strip().startswith(engine.text(said).strip())


@pytest.mark.parametrize("best", [0, 3])
def test_logprobs_of_the_prompt_are_of_its_tokens(
    engine: Running, reference: list[int], best: int
) -> None:
    needs(engine, "prompt_logprobs")
    prompt = engine.engine.codec.encode(PROMPT)
    beside = engine.submit(PROMPT, max_tokens=24, ignore_eos=True)
    job = engine.submit(PROMPT, max_tokens=24, ignore_eos=True, prompt_logprobs=best)
    assert engine.alike(engine.tokens(job), reference)
    assert engine.alike(engine.tokens(beside), reference)
    first, *others = engine.finished(job)
    assert all(output.prompt is None for output in others)
    told = first.prompt
    assert told is not None and [one.id for one in told] == prompt
    assert told[0].logprob is None
    for one in told[1:]:
        assert one.logprob is not None and one.logprob <= 1e-4 and one.rank >= 1
        assert len(one.best) == best or engine.spec.engine == "echo"
        if one.rank == 1 and one.best:
            assert one.best[0][0] == one.id
    again = engine.submit(PROMPT, max_tokens=1, prompt_logprobs=best)  # all of it in a cache
    repeated = engine.finished(again)[0].prompt
    assert repeated is not None
    for one, other in zip(told[1:], repeated[1:], strict=True):
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4 if engine.exact else 0.1)


def test_logprobs_of_the_prompt_are_those_of_an_answer(engine: Running) -> None:
    needs(engine, "prompt_logprobs", "logprobs")
    job = engine.submit(PROMPT, max_tokens=12, ignore_eos=True, logprobs=2)
    prompt = engine.engine.codec.encode(PROMPT)
    said, scored = engine.tokens(job), engine.logprobs(job)
    again = engine.submit([*prompt, *said], max_tokens=1, prompt_logprobs=2)
    told = engine.finished(again)[0].prompt
    assert told is not None
    for one, known in zip(told[len(prompt) :], scored, strict=True):
        assert one.token == known.token
        # a prompt is read in other batches than an answer, and llama.cpp's cache is float16
        exact = 5e-3 if engine.spec.engine == "llamacpp" else 1e-4
        assert one.logprob == pytest.approx(known.logprob, abs=exact if engine.exact else 0.2)


# ---------------------------------------------------------------- what another worker began


@pytest.mark.parametrize("sampled", [False, True])
def test_it_goes_on_where_another_worker_stopped(
    engine: Running, subject: Subject, sampled: bool
) -> None:
    if not engine.info.resumes:
        pytest.skip("it does not resume")
    if sampled and not subject.seeds_go_on:
        pytest.skip("its seeds do not go on")
    params: Params = {"max_tokens": 20, "ignore_eos": True}
    params |= {"temperature": 1.0, "seed": 11} if sampled else {}
    whole = engine.generate(PROMPT, **params)
    for done in (1, 8, 19):
        job = engine.submit(PROMPT, whole[:done], **params)
        assert engine.alike(engine.tokens(job), whole[done:])
        assert engine.finish(job) == "length"


# ---------------------------------------------------------------- many, and those that leave


def test_sixty_four_at_once_all_end_right(engine: Running, reference: list[int]) -> None:
    jobs = {
        engine.submit(PROMPT, max_tokens=1 + number % 24, ignore_eos=True): 1 + number % 24
        for number in range(64)
    }
    for job, count in jobs.items():
        assert engine.alike(engine.tokens(job), reference[:count])
    poll("it is idle", engine.is_idle)


def test_as_many_run_at_once_as_it_has_slots(engine: Running) -> None:
    slots = engine.info.slots
    poll("it is idle", engine.is_idle)
    jobs = [engine.submit(PROMPT, **engine.endless) for _ in range(slots + 2)]

    def begun() -> int:
        return sum(job in engine.outputs for job in jobs)

    try:
        engine.until(lambda: begun() >= slots, "its slots are full")
        steps = len(engine.outputs[jobs[0]])
        engine.until(lambda: len(engine.outputs[jobs[0]]) > steps + 2, "it has gone on")
        now = engine.engine.load_now()
        assert (begun(), now.running, now.waiting) == (slots, slots, 2)
    finally:
        for job in jobs:
            engine.engine.cancel(job)


def test_its_load_is_told_while_it_works_and_nothing_when_idle(engine: Running) -> None:
    poll("it is idle", engine.is_idle)
    job = engine.submit(PROMPT, **engine.endless)
    engine.has_begun(job)
    now = engine.engine.load_now()
    assert now.running + now.waiting == 1
    assert 0 <= now.progress_age_s < 30
    assert 0 <= now.kv_used <= 1
    engine.engine.cancel(job)
    poll("it is idle", engine.is_idle)


def test_who_leaves_frees_a_slot_and_is_not_heard_of_again(
    engine: Running, reference: list[int]
) -> None:
    jobs = [engine.submit(PROMPT, **engine.endless) for _ in range(min(engine.info.slots, 16) + 2)]
    engine.has_begun(jobs[0])
    waits = engine.submit(PROMPT, max_tokens=24, ignore_eos=True)
    for job in jobs:
        engine.engine.cancel(job)
    assert engine.alike(engine.tokens(waits), reference)
    assert_well(engine, reference)  # the step in which they were cancelled is over
    said = [len(engine.outputs.get(job, ())) for job in jobs]
    assert_well(engine, reference)
    assert [len(engine.outputs.get(job, ())) for job in jobs] == said
    assert not any(engine.ended(job) for job in jobs)
    poll("it is idle", engine.is_idle)


def test_cancelling_before_the_first_step_and_after_the_end(
    engine: Running, reference: list[int]
) -> None:
    cancelled = [engine.submit(PROMPT, **engine.endless) for _ in range(20)]
    for job in cancelled:
        engine.engine.cancel(job)
    done = engine.submit(PROMPT, max_tokens=1, ignore_eos=True)
    engine.finished(done)
    engine.engine.cancel(done)
    engine.engine.cancel(123456789)
    assert_well(engine, reference)
    poll("it is idle", engine.is_idle)
    assert not any(engine.ended(job) for job in cancelled)


# ---------------------------------------------------------------- what it cannot do


ABSURD: dict[str, tuple[str | list[int], Params]] = {
    "an empty prompt": ([], {}),
    "a token that is none": ([1, 2**31 - 1], {}),
    "a negative token": ([1, -1], {}),
    "a top_k above the vocabulary": ("abc", {"temperature": 1.0, "top_k": 10**9}),
    "a temperature of next to nothing": ("abc", {"temperature": 1e-9, "seed": 1}),
    "a huge temperature": ("abc", {"temperature": 100.0, "seed": 1}),
    "min_tokens above max_tokens": ("abc", {"min_tokens": 99}),
}


@pytest.mark.parametrize("what", ABSURD)
def test_what_is_absurd_harms_nobody(engine: Running, reference: list[int], what: str) -> None:
    """It is refused by a RequestError, fails alone, or is done; the others go on."""
    prompt, params = ABSURD[what]
    beside = engine.submit(PROMPT, max_tokens=24, ignore_eos=True)
    job = engine.job(prompt, **params)
    try:
        engine.engine.submit(job)
    except RequestError as error:
        assert len(error.message) > 5
    else:
        engine.until(lambda: engine.ended(job.id), f"{what} comes to an end")
    assert engine.alike(engine.tokens(beside), reference)
    assert_well(engine, reference)


def test_more_than_the_context_harms_nobody(engine: Running, reference: list[int]) -> None:
    [token] = engine.engine.codec.encode("a")[:1]
    job = Job(10**9, [token] * (engine.info.max_context + 1), SamplingParams(max_tokens=1))
    try:
        engine.engine.submit(job)
    except RequestError as error:
        assert len(error.message) > 5
    else:
        engine.until(lambda: engine.ended(job.id), "it comes to an end")
    assert_well(engine, reference)


def test_a_prompt_fills_the_context_where_nothing_is_told_but_of_it(
    engine: Running, reference: list[int]
) -> None:
    if not engine.engine.fills_context:
        pytest.skip("it needs room for a token of its own")
    scores = 0 if "prompt_logprobs" in engine.info.serves else None
    [token] = engine.engine.codec.encode("a")[:1]
    context = engine.info.max_context
    job = engine.submit([token] * context, max_tokens=1, prompt_logprobs=scores)
    told = engine.finished(job)[0].prompt
    assert scores is None or (told is not None and len(told) == context)
    assert_well(engine, reference)


# ---------------------------------------------------------------- what some can do


def test_embeddings(engine: Running) -> None:
    if "embed" not in engine.info.serves:
        with pytest.raises(Unsupported):
            engine.embed("a")
        return
    texts = [PROMPT, "something else", PROMPT]
    vectors = [array.array("f", one) for one in engine.embed(*texts)]
    assert [len(vector) for vector in vectors] == [engine.info.embedding_size] * 3
    assert vectors[0] == vectors[2] != vectors[1]
    [alone] = engine.embed(PROMPT)
    assert list(array.array("f", alone)) == pytest.approx(list(vectors[0]), abs=1e-3)


REGEX = Grammar("regex", "(ab){3}c")


def test_a_grammar_is_kept_to(engine: Running) -> None:
    if "grammar" not in engine.info.serves:
        with pytest.raises(Unsupported):
            engine.engine.constrain(REGEX, [])
        return
    params: Params = {"grammar": REGEX, "max_tokens": 40}
    job = engine.submit(PROMPT, **params)
    tokens = engine.tokens(job)
    assert (engine.text(tokens), engine.finish(job)) == ("abababc", "stop")
    if engine.info.resumes and len(tokens) > 1:
        assert engine.generate(PROMPT, emitted=tokens[:1], **params) == tokens[1:]
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    beside = engine.submit(PROMPT, grammar=Grammar("json_schema", schema), max_tokens=60)
    said = engine.text(engine.tokens(beside))
    assert engine.finish(beside) == "length" or '"a"' in said


def test_a_wrong_grammar_is_refused(engine: Running, reference: list[int]) -> None:
    needs(engine, "grammar")
    with pytest.raises(RequestError):
        engine.engine.constrain(Grammar("regex", "(a"), [])
    assert_well(engine, reference)


def test_adapters_come_and_go(
    engine: Running, subject: Subject, model: Path, tmp_path: Path, reference: list[int]
) -> None:
    if "adapters" not in engine.info.serves:
        with pytest.raises(Unsupported):
            engine.engine.unload_adapter("any")
        return
    assert subject.adapter is not None, "its row does not say how one is made"
    adapter = subject.adapter(model, tmp_path / "adapter")
    assert engine.engine.load_adapter(adapter).name == adapter.name
    params: Params = {"max_tokens": 24, "ignore_eos": True}
    said = engine.generate(PROMPT, adapter=adapter.name, **params)
    assert said != reference
    jobs = [engine.submit(PROMPT, adapter=name, **params) for name in (adapter.name, "") * 4]
    for job, expected in zip(jobs, [said, reference] * 4, strict=True):
        assert engine.alike(engine.tokens(job), expected)
    engine.engine.unload_adapter(adapter.name)
    assert_well(engine, reference)
    with pytest.raises(RequestError):
        engine.submit(PROMPT, adapter=adapter.name)


def test_an_adapter_that_is_none_is_refused(
    engine: Running, subject: Subject, tmp_path: Path, reference: list[int]
) -> None:
    needs(engine, "adapters")
    from servekit.protocol.adapters import AdapterSpec

    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(RequestError):
        engine.engine.load_adapter(AdapterSpec("wrong", str(tmp_path)))
    assert_well(engine, reference)


def test_sleep_changes_nothing_that_it_says(engine: Running, reference: list[int]) -> None:
    if not engine.info.sleeps:
        with pytest.raises(Unsupported):
            engine.engine.sleep()
        return
    for _ in range(2):
        poll("it is idle", engine.is_idle)
        engine.engine.sleep()
        assert engine.is_idle()
        engine.engine.wake()
        assert_well(engine, reference)


# ---------------------------------------------------------------- what it has loaded


@pytest.mark.parametrize(
    "stated",
    [{"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 1}],
    ids=lambda stated: "-".join(map(str, stated.values())),
)
def test_the_files_defaults_are_those_of_a_request(
    subject: Subject, tmp_path: Path, stated: Params
) -> None:
    """`models[].sampling`. One of these is far from any default of the engine's own."""
    running = Running(replace(subject.spec(tmp_path), sampling=stated))
    try:
        params: Params = {"max_tokens": 24, "ignore_eos": True, "seed": 5, "temperature": None}
        expected = running.generate(PROMPT, **params | stated)
        assert running.alike(running.generate(PROMPT, **params), expected)
    finally:
        running.close()


def test_what_it_has_loaded_is_told_apart(subject: Subject, tmp_path: Path) -> None:
    """Workers go on with each other's answers only where their digests are the same."""
    spec = subject.spec(tmp_path)
    ours = [file for file in tmp_path.rglob("*") if file.is_file()]
    if not ours and not spec.files and not Path(spec.path).exists():
        pytest.skip("it reads no file")

    def identity() -> str:
        running = Running(spec)
        running.close()
        return running.engine.identify()

    before = identity()
    assert before and before == identity()
    if ours:  # else they are a user's, and stay as they are
        os.utime(max(ours, key=lambda file: file.stat().st_size), (1, 1))
        assert identity() != before


# ---------------------------------------------------------------- its life


def _threads() -> set[str]:
    """But tqdm's monitor, which whoever shows progress starts, once a process."""
    found = [thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"]
    return {f"{thread.name} {thread.ident}" for thread in found}


def _processes() -> set[psutil.Process]:
    """But multiprocessing's own, which lives as long as the process that has started one."""
    found = psutil.Process().children(recursive=True)
    return {one for one in found if not any("resource_tracker" in word for word in _command(one))}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it is gone
        return []


def test_a_life_leaves_nothing_behind(
    subject: Subject, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Threads and processes go with it, work in flight or not; stdout is not its to write on."""
    (tmp_path / "model").mkdir()
    threads, processes = _threads(), _processes()
    capfd.readouterr()
    running = Running(subject.spec(tmp_path / "model"))
    try:
        assert len(running.generate(PROMPT, max_tokens=3, ignore_eos=True)) == 3
        running.has_begun(running.submit(PROMPT, **running.endless))
    finally:
        running.close()
    poll("its threads end", lambda: _threads() <= threads)
    poll("its processes end", lambda: _processes() <= processes)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("fault", ["in a step", "where it tells"])
def test_a_death_is_known_at_once_and_after_all_that_was_made(
    subject: Subject, tmp_path: Path, fault: str
) -> None:
    """What has come before stays told, nothing follows, and no job is blamed: all go on elsewhere.

    An engine that cannot be told to fail dies of an `emit` that raises, which its loop calls.
    """
    running = Running(subject.spec(tmp_path))
    engine, told = running.engine, threading.Event()
    heard: list[tuple[BaseException | None, int]] = []  # of what, and how many tokens had come

    def count() -> int:
        return sum(len(one.token_ids) for outputs in running.outputs.values() for one in outputs)

    def on_death() -> None:
        heard.append((engine.fatal, count()))
        told.set()

    engine.on_death = on_death
    try:
        job = running.submit(PROMPT, **running.endless)
        running.has_begun(job)
        if fault == "in a step":
            try:
                engine.fail_step()
            except Unsupported as error:
                pytest.skip(error.message)
        else:
            running.breaks = RuntimeError("nobody listens")
        assert told.wait(60), "its death was not told"
        [(cause, tokens)] = heard
        assert isinstance(cause, Exception) and cause is engine.fatal
        assert not running.ended(job)
        running.submit_late(PROMPT)
        assert tokens == count() and running.late == []
    finally:
        running.close()
