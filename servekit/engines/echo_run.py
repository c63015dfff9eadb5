"""What the echo engine says, and how its characters are tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from servekit.engines.base import Job, StepOutput
from servekit.engines.transforms import Transform, transformed
from servekit.wire.messages import ChatMessage, TokenLogprob

#: Halves of UTF-16 characters are code points, but no characters, and UTF-8 cannot say them.
_HALVES = re.compile("[\ud800-\udfff]")


class EchoDecoder:
    def push(self, token_ids: Sequence[int]) -> str:
        text = "".join(map(chr, token_ids))
        return text if text.isascii() else _HALVES.sub("\N{REPLACEMENT CHARACTER}", text)

    def flush(self) -> str:
        return ""


class EchoCodec:
    """One character is one token; a chat is its last message."""

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        return list(map(ord, text))

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        return list(map(ord, messages[-1].content))

    def decoder(self, markers: Collection[str] = ()) -> EchoDecoder:
        return EchoDecoder()


class Run:
    """One job under way: what it will say, and how far it is."""

    __slots__ = ("best", "cached", "done", "id", "limit", "prompt", "seed", "unread_s")

    def __init__(self, job: Job, transform: Transform | None = None) -> None:
        params = job.params
        sampled = params.seed is not None or bool(params.temperature)
        self.id = job.id
        self.prompt = job.prompt_ids
        if transform is not None:
            self.prompt = [transformed(token, transform) for token in job.prompt_ids]
        self.limit = params.max_tokens or len(job.prompt_ids)
        self.done = len(job.emitted)
        self.best = params.logprobs
        self.cached, self.unread_s = 0, 0.0  # of its prompt: tokens, and what is yet to be read
        self.seed = (secrets.randbits(32) if params.seed is None else params.seed) if sampled else 0

    def take(self, count: int) -> StepOutput:
        """The next tokens, at most `count`; the token at a position depends on nothing else."""
        prompt, size, first = self.prompt, len(self.prompt), self.done + self.seed
        stop = min(self.done + count, self.limit) + self.seed
        tokens = [prompt[i % size] for i in range(first, stop)]
        self.done += len(tokens)
        output = StepOutput(self.id, tokens, "length" if self.done >= self.limit else None)
        output.cached_tokens = self.cached
        if self.best is not None:
            output.logprobs = [_certain(token, self.best) for token in tokens]
        return output


def _certain(token: int, best: int) -> TokenLogprob:
    text = EchoDecoder().push([token]).encode()
    return TokenLogprob(text, 0.0, ((text, 0.0),) if best else ())
