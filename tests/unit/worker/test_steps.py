"""What an engine's steps bring, where most are one more token: nothing else is lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servekit.engines.api.base import StepOutput
from servekit.engines.echo.run import EchoDecoder
from servekit.protocol.messages import (
    Delta,
    Failed,
    Hello,
    SamplingParams,
    WorkerToGateway,
)
from tests.unit.gateway.conftest import until
from tests.unit.worker.serving import deltas_of, serving, spec

SAID = "hello, world"
STEP_S = 0.001


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_a_step_is_counted_before_its_gateway_hears_of_it(tmp_path: Path) -> None:
    async with serving(spec(tmp_path, step_s=STEP_S)) as client:
        counted: list[tuple[int, int, int]] = []

        def count(tokens: int, ends: int) -> None:
            heard = [
                id for deltas in client.deltas.values() for one in deltas for id in one.token_ids
            ]
            counted.append((tokens, ends, len(heard)))

        client.runner.on_step = count
        params = SamplingParams(max_tokens=len(SAID))
        both = [client.send(params, prompt=SAID) for _ in range(2)]
        assert [text(await client.answer(one)) for one in both] == [SAID, SAID]
    tokens, ends, _ = zip(*counted, strict=True)
    assert (sum(tokens), sum(ends)) == (2 * len(SAID), 2)
    assert all(heard <= sum(tokens[:at]) for at, (_, _, heard) in enumerate(counted))


async def test_what_came_before_a_failure_of_the_same_turn_is_told_before_it(
    tmp_path: Path,
) -> None:
    """A client gets all that was made for it, whatever becomes of the rest."""
    async with serving(spec(tmp_path, step_s=3600.0)) as client:
        asked = client.send(SamplingParams(max_tokens=9), prompt=SAID)
        await until(lambda: client.runner.busy)
        told: list[Any] = []
        client.connection.switch_protocol(WorkerToGateway, told.append, lambda error: None)
        (peer,) = [peer for peer in client.runner.peers if peer.jobs]
        (job_id,) = peer.jobs.values()
        client.runner.emit(
            [
                StepOutput(job_id, [104]),
                StepOutput(job_id, [101]),
                StepOutput(job_id, [], "stop", error="it broke"),
            ]
        )
        await until(lambda: told and isinstance(told[-1], Failed))
        *before, failed = [one for one in told if not isinstance(one, Hello)]  # it may be late
        assert text([delta for one in before for delta in deltas_of(one)]) == "he"
        assert (failed.id, failed.message) == (asked, "it broke")


async def test_tokens_that_cannot_be_decoded_spoil_their_own_answer_alone(tmp_path: Path) -> None:
    class Broken(EchoDecoder):
        def push(self, token_ids: Sequence[int]) -> str:
            if ord("!") in token_ids:
                raise OverflowError("no such token")
            return super().push(token_ids)

    async with serving(spec(tmp_path, step_s=STEP_S)) as client:
        client.engine.codec.decoder = lambda markers=(): Broken()  # type: ignore[method-assign]
        bad = client.send(SamplingParams(max_tokens=20), prompt="what! It is late")
        good = client.send(SamplingParams(max_tokens=len(SAID)), prompt=SAID)
        failed = await client.failure(bad)
        assert (failed.code, text(await client.answer(good))) == ("engine_error", SAID)
        assert text(client.deltas[bad]) == "what"
        await until(lambda: not client.engine.load_now().running)


async def test_what_has_been_sent_is_left_out_of_single_tokens_too(tmp_path: Path) -> None:
    """A client may have more characters than the tokens told make: of the next ones, then."""
    async with serving(spec(tmp_path, step_s=STEP_S)) as client:
        params = SamplingParams(max_tokens=len(SAID))
        begun = list(map(ord, SAID[:2]))
        asked = client.send(params, prompt=SAID, emitted=begun, sent_chars=5)
        deltas = await client.answer(asked)
    assert text(deltas) == SAID[5:]
    assert [id for delta in deltas for id in delta.token_ids] == list(map(ord, SAID[2:]))


async def test_each_single_token_has_its_log_probability(tmp_path: Path) -> None:
    async with serving(spec(tmp_path, step_s=STEP_S)) as client:
        params = SamplingParams(max_tokens=len(SAID), logprobs=0)
        deltas = await client.answer(client.send(params, prompt=SAID))
    assert [one.token.decode() for delta in deltas for one in delta.logprobs] == list(SAID)
