"""New grammars are compiled in a process that can be killed, and what explodes stays in there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from servekit.engines.text import grammar_trial
from servekit.engines.text import structured_output as grammar_module
from servekit.engines.text.grammar_trial import MOST_WAITING, TURNS_S, Verdict
from servekit.engines.text.structured_output import Grammars
from servekit.errors import ModelUnavailable, RequestError
from servekit.protocol.messages import Grammar
from tests.polling import poll
from tests.unit.engines.harness import byte_level_tokenizer

#: Takes this process's lifetime to compile, and then its memory.
EXPLOSIVE = '{"type": "integer", "multipleOf": %d}'
#: Turns that last until a test has seen a trial in them, and killed it.
LONG_TURNS_S = (60.0, 60.0)
PRIMES = (33_333_343, 33_333_349, 33_333_361, 33_333_367, 33_333_373, 33_333_379, 33_333_389)


def schema(text: str) -> Grammar:
    return Grammar("json_schema", text)


def ordinary(number: int) -> Grammar:
    return schema(json.dumps({"type": "object", "properties": {f"p{number}": {"type": "string"}}}))


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def trials_of(pid: int) -> list[int]:
    """Wait for the children of a trial process."""
    return poll("it tries", lambda: children(pid))


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(byte_level_tokenizer(), 400, frozenset({2}))
    made.constraint(ordinary(0))
    yield made
    assert made.trials.trial_pid is not None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (EXPLOSIVE % 33_333_333, '"multipleOf"'),
        (EXPLOSIVE % 999_983, '"multipleOf"'),
        ('{"allOf": [{"multipleOf": 9973, "type": "integer"}, {"multipleOf": 9967}]}', '"allOf"'),
    ],
)
def test_what_explodes_is_refused_and_leaves_the_worker_as_it_was(
    grammars: Grammars, text: str, named: str
) -> None:
    before = peak_bytes()
    with pytest.raises(RequestError, match="The JSON schema cannot be used: comp") as caught:
        grammars.constraint(schema(text))
    assert named in str(caught.value) and caught.value.status == 400
    assert caught.value.param == "response_format"
    assert peak_bytes() - before < 16 * 2**20
    began = time.monotonic()
    with pytest.raises(RequestError):
        grammars.constraint(schema(text))
    assert time.monotonic() - began < TURNS_S[1], "it is known by now"
    grammars.constraint(ordinary(1))


@pytest.mark.lane("long")
def test_what_aborts_is_refused_and_the_next_one_served(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has killed it: an abort for want of memory, the kernel for want of its own."""
    monkeypatch.setattr(grammar_trial, "TURNS_S", LONG_TURNS_S)
    names = [f"v{number}" for number in range(200)]
    text = json.dumps({"enum": names})
    process = grammars.trials
    assert process.trial_pid is not None
    for signal_sent in (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV):
        with ThreadPoolExecutor(1) as pool:
            explosive = schema(EXPLOSIVE % (PRIMES[0] + signal_sent))
            asked = pool.submit(grammars.constraint, explosive)
            os.kill(trials_of(process.trial_pid)[0], signal_sent)
            with pytest.raises(RequestError, match="MiB or overflows the stack") as caught:
                asked.result()
            assert caught.value.status == 400
    grammars.constraint(schema(text))


def test_a_trial_whose_process_is_killed_is_done_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "TURNS_S", LONG_TURNS_S)
    before = grammars.trials.trial_pid
    assert before is not None
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(grammars.constraint, schema(EXPLOSIVE % 60_013))
        assert trials_of(before)
        os.kill(before, signal.SIGKILL)
        assert not asked.result().failure
    grammars.constraint(ordinary(2))
    assert grammars.trials.trial_pid not in (None, before)
    assert not is_alive(before)


@pytest.mark.lane("long")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_and_its_trials_end_with_the_worker(
    end: signal.Signals, tmp_path: Path
) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    program = f"""
from transformers import PreTrainedTokenizerFast
from servekit.engines.text import grammar_trial
from servekit.engines.text.structured_output import Grammars
from servekit.protocol.messages import Grammar
grammar_trial.TURNS_S = {LONG_TURNS_S}
tokenizer = PreTrainedTokenizerFast.from_pretrained({str(tmp_path)!r})
grammars = Grammars(tokenizer, 400, frozenset({{2}}))
grammars.constraint(Grammar("regex", "[0-9]"))
print(grammars.trials.trial_pid, flush=True)
grammars.constraint(Grammar("json_schema", {EXPLOSIVE % PRIMES[0]!r}))
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    with worker:
        process = int(worker.stdout.readline())
        [trial] = trials_of(process)
        worker.send_signal(end)
        worker.wait()
        poll("nothing is left", lambda: not is_alive(process) and not is_alive(trial))


@pytest.mark.lane("long")
def test_a_crowd_of_explosive_ones_holds_up_nobody_for_long(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "TURNS_S", (TURNS_S[0], 0.3))
    outcomes: list[int] = []

    def attack(number: int) -> None:
        try:
            grammars.constraint(schema(EXPLOSIVE % (PRIMES[0] + 2 * number)))
        except RequestError as error:
            outcomes.append(error.status)
            assert error.status == 400 or error.retry_after_s

    attackers = [threading.Thread(target=attack, args=(number,)) for number in range(30)]
    for one in attackers:
        one.start()
    grammars.constraint(ordinary(3))
    assert any(one.is_alive() for one in attackers), "they are not done yet"
    grammars.constraint(ordinary(0))
    assert any(one.is_alive() for one in attackers), "one that is known waits for nobody"
    for one in attackers:
        one.join()
    assert outcomes.count(400) >= MOST_WAITING and outcomes.count(503) >= 1
    assert len(outcomes) == 30


def test_many_that_bring_the_same_one_wait_for_one_trial(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, judge = list[Grammar](), grammars.trials.try_grammar

    def count(grammar: Grammar, *, patient: bool) -> Verdict:
        trials.append(grammar)
        return judge(grammar, patient=patient)

    monkeypatch.setattr(grammars.trials, "try_grammar", count)
    with ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(grammars.constraint, schema(EXPLOSIVE % PRIMES[1])) for _ in range(40)]
        refused = [one.exception() for one in asked]
    assert all(isinstance(one, RequestError) and one.status == 400 for one in refused)
    assert len(trials) < 20, "not 40 trials"


def test_busy_is_no_answer_to_a_text_that_has_begun(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "MOST_WAITING", 0)
    monkeypatch.setattr(grammar_trial, "TURNS_S", (0.004, LONG_TURNS_S[1]))
    slow = schema(EXPLOSIVE % 30_011)  # takes ten first turns and more on any machine
    with pytest.raises(ModelUnavailable) as caught:
        grammars.constraint(slow)
    assert caught.value.retry_after_s and caught.value.param == "response_format"
    said = byte_level_tokenizer().encode("3")
    assert not grammars.constraint(slow, said).failure


def test_the_cache_is_bounded_by_what_it_holds(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 40 * 2**20  # each takes 9 to 14 MiB
    monkeypatch.setattr(grammar_module, "KEPT_BYTES", limit)
    for number in range(12):
        grammars.constraint(schema(EXPLOSIVE % (10_007 + 2 * number)))
    held = grammars._kept
    assert 1 <= len(held) < 12
    assert sum(one.bytes for one in held.values()) == grammars._kept_bytes <= limit
    assert grammars._kept_bytes > 2**20, "they are charged what they take"


def test_special_tokens_are_known_in_there(grammars: Grammars) -> None:
    constraint = grammars.constraint(Grammar("lark", 'start: <|im_end|> "a" <[65]>'))
    assert not constraint.failure
