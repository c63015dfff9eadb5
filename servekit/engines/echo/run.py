"""What the echo engine says, and how its characters are tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from servekit.engines.api.base import Job, StepOutput
from servekit.engines.echo.adapters import Transform, transformed
from servekit.protocol.messages import ChatMessage, PromptToken, TokenLogprob

#: Halves of UTF-16 characters are code points, but no characters, and UTF-8 cannot say them.
_HALVES = re.compile("[\ud800-\udfff]")


class EchoDecoder:
    def push(self, token_ids: Sequence[int]) -> str:
        one = len(token_ids) == 1  # as in most steps
        text = chr(token_ids[0]) if one else "".join(map(chr, token_ids))
        return text if text.isascii() else _HALVES.sub("\N{REPLACEMENT CHARACTER}", text)

    def flush(self) -> str:
        return ""


class EchoCodec:
    """One character is one token; a chat is its last message."""

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        return list(map(ord, text))

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        return list(map(ord, messages[-1].content))

    def token_bytes(self) -> int:
        return 4

    def decoder(self, markers: Collection[str] = ()) -> EchoDecoder:
        return EchoDecoder()


class Run:
    """One job under way: what it will say, and how far it is."""

    __slots__ = (
        *("best", "cached", "done", "ends", "id", "limit", "prompt", "seed", "told", "unread_s"),
    )

    def __init__(self, job: Job, transform: Transform | None = None) -> None:
        params = job.params
        sampled = params.seed is not None or bool(params.temperature)
        self.id = job.id
        self.prompt = job.prompt_ids
        if transform is not None:
            self.prompt = [transformed(token, transform) for token in job.prompt_ids]
        self.limit = params.max_tokens or len(job.prompt_ids)
        self.done = min(len(job.emitted), self.limit)
        self.best = params.logprobs
        self.told: list[PromptToken] | None = None  # of its prompt, with the first output
        if params.prompt_logprobs is not None:
            self.told = _certain_prompt(job.prompt_ids, params.prompt_logprobs)
        self.ends = frozenset(params.stop_token_ids)
        self.cached, self.unread_s = 0, 0.0  # of its prompt: tokens, and what is yet to be read
        self.seed = (secrets.randbits(32) if params.seed is None else params.seed) if sampled else 0

    def take(self, count: int) -> StepOutput:
        """The next tokens, at most `count`; the token at a position depends on nothing else."""
        left = self.limit - self.done
        count = count if count < left else left
        first = (self.done + self.seed) % len(self.prompt)
        tokens = self.prompt[first : first + count]
        while len(tokens) < count:  # from its beginning again
            tokens += self.prompt[: count - len(tokens)]
        self.done += count
        output = StepOutput(self.id, tokens, "length" if count == left else None)
        if self.ends and not self.ends.isdisjoint(tokens):
            at = next(at for at, token in enumerate(tokens) if token in self.ends)
            output.stop_token, output.finish = tokens[at], "stop"
            output.token_ids = tokens = tokens[:at]
        if self.cached:
            output.cached_tokens = self.cached
        if self.told is not None:
            output.prompt, self.told = self.told, None
        if self.best is not None:
            output.logprobs = [_certain(token, self.best) for token in tokens]
        return output


def _certain_prompt(ids: list[int], best: int) -> list[PromptToken]:
    texts = [EchoDecoder().push([token]).encode() for token in ids]
    made = [PromptToken(ids[0], texts[0])]
    for token, text in zip(ids[1:], texts[1:], strict=True):
        made.append(PromptToken(token, text, 0.0, 1, ((token, text, 0.0),) if best else ()))
    return made


def _certain(token: int, best: int) -> TokenLogprob:
    text = EchoDecoder().push([token]).encode()
    return TokenLogprob(text, 0.0, ((text, 0.0),) if best else ())
