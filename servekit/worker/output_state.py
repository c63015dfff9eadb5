"""State of one request in the worker, updated with every step of the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from servekit.engines.api.base import SpeechOutput, StepOutput
from servekit.engines.api.text_engine import TextOutput
from servekit.errors import EngineFailed, RequestError
from servekit.protocol.messages import (
    PROOF_TOKENS,
    Continuation,
    Delta,
    Generate,
    Prompt,
    TokenLogprob,
)
from servekit.protocol.types import FinishReason
from servekit.worker.detokenizer import CountedText, TextStream
from servekit.worker.preparation.request_preparation import pack_ids

if TYPE_CHECKING:
    from servekit.worker.gateway_connection import GatewayConnection


class OutputState:
    """A request and its progress."""

    __slots__ = (
        "began",
        "begins",
        "cached",
        "completion",
        "decode",
        "held",
        "id",
        "peer",
        "plain",
        "prompt",
        "prompt_tokens",
        "text",
    )

    def __init__(
        self, peer: GatewayConnection, request: Generate, prompt_tokens: int, text: TextStream
    ) -> None:
        self.peer = peer
        self.id = request.id
        self.prompt_tokens = prompt_tokens
        #: Of a request that other workers may continue, until that is reported: its prompt, its
        #: token limit, and itself.
        self.begins: tuple[list[int], int, Generate] | None = None
        self.completion = self.began = len(request.emitted)
        self.text = text
        self.held = text.push(request.emitted) if request.emitted else ""
        self.cached = 0  # prompt tokens served from the engine's cache
        self.prompt: Prompt | None = None  # prompt data to send with the first delta
        self.plain = False  # later tokens may be sent by `add_one`: only their text and id
        self.decode = text.decode  # used for tokens sent by `add_one`, without stop strings

    @property
    def proven(self) -> bool:
        """Return whether the request has produced enough tokens to be no longer suspect."""
        return self.completion - self.began >= PROOF_TOKENS

    def continuation(self, generation: Callable[[str], str]) -> Continuation:
        """Return the state that another worker needs to continue; sent once, with the first tokens.

        `generation` maps an adapter's name, or "" for the base model, to its generation. A plain
        prompt is left out: every worker tokenises it alike, but may have room for more of it.
        """
        assert self.begins is not None
        (ids, limit, request), self.begins = self.begins, None
        alike = request.messages is None and not request.params.truncate_prompt
        packed = b"" if alike else pack_ids(ids)
        return Continuation(generation(request.adapter), limit, packed)

    def pass_on(self, output: StepOutput) -> bool:
        """Send the step's output if it is exactly one token; requires `plain`.

        Returns False if the output holds anything else.
        """
        token_ids = output.token_ids
        if len(token_ids) != 1 or output.finish is not None or output.error is not None:
            return False
        if output.logprobs is not None or output.cached_tokens:
            return False
        self.completion += 1
        self.peer.add_one(self.id, self.decode(token_ids), token_ids[0])
        return True

    def delta(self, output: StepOutput) -> Delta:
        """Return the step's output as the message for the gateway."""
        ids, stream, prompt = output.token_ids, self.text, self.prompt_tokens
        if output.cached_tokens:
            self.cached = min(output.cached_tokens, prompt)
        text, count = stream.push_until_stop(ids)
        self.completion += count
        if count < len(ids):  # what follows a stop string is not part of the answer
            ids = ids[:count]
        if self.held:
            text, self.held = self.held + text, ""
        self.plain = stream.plain
        finish: FinishReason | None = "stop" if stream.stopped else output.finish
        logprobs = output.logprobs or []
        if finish is None:
            if self.cached:
                return Delta(self.id, text, ids, None, prompt, 0, logprobs, [], "", self.cached)
            return Delta(self.id, text, ids, None, prompt, 0, logprobs)
        if not stream.stopped:
            text += stream.finish(output.stop_token)
        if stream.stopped:
            finish, stop, ended = "stop", stream.found_stop, -1
        else:
            stop, ended = "", output.stop_token
        return Delta(
            self.id, text, ids, finish, prompt, self.completion, logprobs, output.vectors or [],
            stop, self.cached, stop_token=ended,
        )  # fmt: skip


class SilentTask(OutputState):
    """A request for zero tokens. The engine generates one, which is not sent."""

    def delta(self, output: StepOutput) -> Delta:
        self.completion += PROOF_TOKENS
        self.cached = min(output.cached_tokens, self.prompt_tokens)
        counts = (self.prompt_tokens, 0)
        return Delta(self.id, "", [], "length", *counts, [], [], "", self.cached)


def find_failure(output: StepOutput) -> RequestError | None:
    """Return the error with which a step ended a request, if any."""
    if output.error is not None:
        message, param = output.error, output.param
        return EngineFailed(message) if param is None else RequestError(message, param=param)
    return output.failure if isinstance(output, TextOutput) else None


class TextTask(OutputState):
    """A request to an engine that returns text. Any output proves that the request is harmless."""

    def __init__(self, peer: GatewayConnection, request: Generate) -> None:
        super().__init__(peer, request, 0, TextStream(_NoDecoder(), ()))

    def delta(self, output: StepOutput) -> Delta:
        """Return the step's output as the message for the gateway."""
        assert isinstance(output, TextOutput)
        self.completion += PROOF_TOKENS  # one step is proof: the model runs elsewhere
        counts = (output.prompt_tokens, output.completion_tokens)
        lists = (output.logprobs or [], output.vectors or [])
        return Delta(
            self.id, output.text, output.token_ids, output.finish, *counts, *lists, output.stop,
            output.cached_tokens, http=output.http,
        )  # fmt: skip

    def continuation(self, generation: Callable[[str], str]) -> Continuation:
        return replace(super().continuation(generation), by_text=True)


class SpeechTask(OutputState):
    """A request to transcribe. Any output proves that the request is harmless."""

    def __init__(self, peer: GatewayConnection, request: Generate) -> None:
        super().__init__(peer, request, 0, TextStream(_NoDecoder(), ()))
        self.begins = [], 0, request
        self._tokens = 0

    def delta(self, output: StepOutput) -> Delta:
        """Return the step's output as the message for the gateway."""
        assert isinstance(output, SpeechOutput)
        self.completion += PROOF_TOKENS  # one window is proof: the others are like it
        self._tokens += len(output.token_ids)
        counts = (output.prompt_tokens, self._tokens)
        return Delta(self.id, "", [], output.finish, *counts, speech=output.speech)


class _NoDecoder:
    """A decoder for engines that return no tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ScoredTask(OutputState):
    """A request for log probabilities that has stop strings.

    A token is sent once part of its text is certain to be sent. A token that may still belong to a
    stop string is held back with its id; a continuation in another worker samples it again.
    """

    __slots__ = ("_counted", "_kept", "_told")

    def __init__(
        self, peer: GatewayConnection, request: Generate, prompt_tokens: int, text: CountedText
    ) -> None:
        super().__init__(peer, request, prompt_tokens, text)
        self._counted = text
        self._kept: deque[tuple[int, int, TokenLogprob]] = deque()  # start in the text, id, score
        self._told = 0

    @property
    def proven(self) -> bool:
        """Return whether enough tokens have been sent, as the gateway counts."""
        return self._told >= PROOF_TOKENS

    def delta(self, output: StepOutput) -> Delta:
        """Return the tokens that may be sent by now, as the message for the gateway."""
        text = self.held + self._read_tokens(output)
        self.held = ""
        finish: FinishReason | None = "stop" if self.text.stopped else output.finish
        if finish is not None and not self.text.stopped:
            text += self.text.finish(output.stop_token)
            finish = "stop" if self.text.stopped else finish
        told = self._take_certain(all_of_them=finish is not None and not self.text.stopped)
        ids, logprobs = [id for _, id, _ in told], [logprob for _, _, logprob in told]
        completion = 0 if finish is None else self.completion
        self.cached = max(self.cached, min(output.cached_tokens, self.prompt_tokens))
        counts, rest = (self.prompt_tokens, completion), (self.text.found_stop, self.cached)
        ended = -1 if self.text.found_stop else output.stop_token
        return Delta(self.id, text, ids, finish, *counts, logprobs, [], *rest, stop_token=ended)

    def _read_tokens(self, output: StepOutput) -> str:
        """Decode the step's tokens, record where each begins, and return the text to send."""
        text = ""
        for id, logprob in zip(output.token_ids, output.logprobs or (), strict=True):
            if self.text.stopped:
                break
            self.completion += 1
            self._kept.append((self._counted.decoded, id, logprob))
            text += self._counted.push([id])
        return text

    def _take_certain(self, *, all_of_them: bool) -> list[tuple[int, int, TokenLogprob]]:
        """Return the held tokens that begin before the end of the certain text, or all."""
        told = []
        while self._kept and (all_of_them or self._kept[0][0] < self._counted.certain):
            told.append(self._kept.popleft())
        self._told += len(told)
        return told


class Stopwatch:
    """Timestamps of traced jobs, Unix times in ns; other jobs are not recorded."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: dict[int, list[int]] = {}  # accepted, submitted to the engine, first token

    @property
    def runs(self) -> bool:
        """Return whether any job is timed."""
        return bool(self._times)

    def accept(self, job_id: int) -> None:
        """Start timing a job."""
        self._times[job_id] = [time.time_ns()]

    def note_submit(self, job_id: int) -> None:
        """Record the time at which a job is submitted to the engine."""
        if (times := self._times.get(job_id)) is not None:
            times.append(time.time_ns())

    def stamp(self, job_id: int, delta: Delta) -> Delta:
        """Record the time of a delta; the last one of a job carries all times (`times_ns`)."""
        times = self._times.get(job_id)
        if times is None:
            return delta
        now = time.time_ns()
        if len(times) == 2:
            times.append(now)
        if delta.finish is None or len(times) < 3:
            return delta
        return replace(delta, times_ns=(*times, now))

    def drop_times(self, job_id: int) -> None:
        """Drop the times of a job that has ended."""
        self._times.pop(job_id, None)
