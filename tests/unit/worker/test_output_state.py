"""Which tokens are told beside their text, however that is cut into tokens and steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.engines.api.base import StepOutput
from servekit.protocol.messages import Delta, Generate, SamplingParams, TokenLogprob
from servekit.worker.detokenizer import CountedText, TextStream
from servekit.worker.output_state import OutputState, ScoredTask
from tests.unit.worker.serving import serving, spec
from tests.unit.worker.test_detokenizer import reference

#: Tokens of several characters, and one without any, as special ones have none.
WORDS = ["a", "b", "c", "ab", "bca", "ccc", ""]
token_ids = st.lists(st.integers(min_value=0, max_value=len(WORDS) - 1), max_size=20)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


class Words:
    """A decoder whose tokens are words."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(WORDS[id] for id in ids)

    def flush(self) -> str:
        return ""


def task(stop: Sequence[str], emitted: list[int], sent_chars: int) -> ScoredTask:
    request = Generate(1, SamplingParams(), emitted=emitted, sent_chars=sent_chars)
    return ScoredTask(cast(Any, None), request, 3, CountedText(Words(), stop, sent_chars))


def step(ids: Sequence[int], *, last: bool) -> StepOutput:
    logprobs = [TokenLogprob(WORDS[id].encode(), -float(id)) for id in ids]
    return StepOutput(1, list(ids), "length" if last else None, logprobs=logprobs)


def run(under_way: OutputState, ids: list[int], size: int, steps: int | None = None) -> list[Delta]:
    """What is told of `ids`, so many in a step, up to the end or for so many steps."""
    parts = [ids[at : at + size] for at in range(0, len(ids), size)] or [[]]
    deltas: list[Delta] = []
    for at, part in enumerate(parts[:steps]):
        deltas.append(under_way.delta(step(part, last=at == len(parts) - 1)))
        if deltas[-1].finish is not None:
            break
    return deltas


def expected(ids: list[int], text: str) -> list[int]:
    """The tokens that begin within the text; all, where no stop string ended it."""
    told, at = [], 0
    for id in ids:
        if at >= len(text) and text != "".join(WORDS[id] for id in ids):
            break
        told.append(id)
        at += len(WORDS[id])
    return told


@given(token_ids, stops, st.integers(min_value=1, max_value=5))
def test_tokens_of_a_stop_string_are_never_told(ids: list[int], stop: list[str], size: int) -> None:
    deltas = run(task(stop, [], 0), ids, size)
    text = "".join(delta.text for delta in deltas)
    if size == 1 and all(len(WORDS[id]) < 2 for id in ids):
        assert text == reference("".join(WORDS[id] for id in ids), stop)
    told = [id for delta in deltas for id in delta.token_ids]
    assert told == expected(ids, text)
    for delta in deltas:
        assert [WORDS[id].encode() for id in delta.token_ids] == [
            one.token for one in delta.logprobs
        ]
    assert deltas[-1].finish is not None


@given(token_ids, stops, st.integers(min_value=1, max_value=3), st.integers(min_value=0))
def test_a_continuation_tells_the_rest(
    ids: list[int], stop: list[str], size: int, steps: int
) -> None:
    """A worker dies after some steps; the next one samples anew what had not been told."""
    whole = run(task(stop, [], 0), ids, size)
    first = run(task(stop, [], 0), ids, size, steps % (len(ids) + 1))
    if first and first[-1].finish is not None:
        return
    told = [id for delta in first for id in delta.token_ids]
    sent = "".join(delta.text for delta in first)
    rest = run(task(stop, told, len(sent)), ids[len(told) :], size)
    both = [*first, *rest]
    assert "".join(d.text for d in both) == "".join(d.text for d in whole)
    assert [id for d in both for id in d.token_ids] == [id for d in whole for id in d.token_ids]


@pytest.mark.parametrize("step_s", [0.0, 0.001])
@pytest.mark.parametrize(("said", "text"), [("abXYZcd", "ab"), ("abXYcd", "abXYcd")])
async def test_a_worker_tells_them_so(tmp_path: Path, step_s: float, said: str, text: str) -> None:
    async with serving(spec(tmp_path, step_s=step_s)) as client:
        params = SamplingParams(max_tokens=len(said), stop=("XYZ",), logprobs=1)
        deltas = await client.answer(client.send(params, prompt=said))
    assert "".join(delta.text for delta in deltas) == text
    assert b"".join(one.token for delta in deltas for one in delta.logprobs).decode() == text
    assert deltas[-1].finish == ("length" if text == said else "stop")
    assert deltas[-1].completion_tokens >= 5


@given(token_ids, stops, st.integers(min_value=2, max_value=5), st.booleans())
def test_tokens_of_a_step_are_as_tokens_that_come_alone(
    ids: list[int], stop: list[str], size: int, scored: bool
) -> None:
    """Also with several in a step, as of speculative decoding, none after a stop string counts."""

    def begin() -> OutputState:
        if scored:
            return task(stop, [], 0)
        request = Generate(1, SamplingParams())
        return OutputState(cast(Any, None), request, 3, TextStream(Words(), stop))

    alone, together = run(begin(), ids, 1), run(begin(), ids, size)
    for part in ("text", "token_ids"):
        one, other = (
            [each for delta in deltas for each in getattr(delta, part)]
            for deltas in (alone, together)
        )
        assert one == other
    last, due = together[-1], alone[-1]
    assert (last.finish, last.stop, last.completion_tokens) == (
        due.finish,
        due.stop,
        due.completion_tokens,
    )
