"""The answer of the echo engine to one job, with its codec, adapters and simulated prefix cache."""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from servekit.engines.api.base import Job, StepOutput, TokenizedText
from servekit.errors import RequestError
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import ChatMessage, PromptToken, TokenLogprob

Transform = Callable[[str], str]
TRANSFORMS: dict[str, Transform] = {
    "upper": str.upper,
    "lower": str.lower,
    "swapcase": str.swapcase,
}
#: Tokens of a block of the prefix cache.
BLOCK = 32
#: Surrogates are code points but not characters, and UTF-8 cannot encode them.
_HALVES = re.compile("[\ud800-\udfff]")


class EchoDecoder:
    def push(self, token_ids: Sequence[int]) -> str:
        one = len(token_ids) == 1  # as in most steps
        text = chr(token_ids[0]) if one else "".join(map(chr, token_ids))
        return text if text.isascii() else _HALVES.sub("\N{REPLACEMENT CHARACTER}", text)

    def flush(self) -> str:
        return ""


class EchoCodec:
    """A codec in which each character is a token, a chat is its last message, and 0 separates the
    texts of a pair.
    """

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        return list(map(ord, text))

    def encode_parts(
        self, text: str, second: str | None = None, instruction: str = ""
    ) -> TokenizedText:
        first = self.encode(text)
        if second is None:
            return TokenizedText(first, [], [1] * len(first))
        ids = [*first, 0, *self.encode(second)]
        after = len(ids) - len(first)
        return TokenizedText(
            ids, [0] * len(first) + [1] * after, [1] * len(first) + [0] + [2] * (after - 1)
        )

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
    """A running job: its answer and position."""

    __slots__ = (
        *("best", "cached", "done", "ends", "id", "limit", "prompt", "seed", "told", "unread_s"),
    )

    def __init__(self, job: Job, transform: Transform | None = None) -> None:
        params = job.params
        sampled = params.seed is not None or bool(params.temperature)
        self.id = job.id
        self.prompt = job.prompt_ids
        if transform is not None:
            self.prompt = [transform_token(token, transform) for token in job.prompt_ids]
        self.limit = params.max_tokens or len(job.prompt_ids)
        self.done = min(len(job.emitted), self.limit)
        self.best = params.logprobs
        self.told: list[PromptToken] | None = None  # prompt log probabilities, for the first output
        if params.prompt_logprobs is not None:
            self.told = _certain_prompt(job.prompt_ids, params.prompt_logprobs)
        self.ends = params.stop_token_ids
        self.cached, self.unread_s = 0, 0.0  # cached tokens, time to read others
        self.seed = (secrets.randbits(32) if params.seed is None else params.seed) if sampled else 0

    def take(self, count: int) -> StepOutput:
        """Return up to `count` next tokens; a token depends on its position and the seed only."""
        left = self.limit - self.done
        count = count if count < left else left
        first = (self.done + self.seed) % len(self.prompt)
        tokens = self.prompt[first : first + count]
        while len(tokens) < count:  # start over from the beginning
            tokens += self.prompt[: count - len(tokens)]
        self.done += count
        output = StepOutput(self.id, tokens, "length" if count == left else None)
        if self.ends and (found := [at for at, token in enumerate(tokens) if token in self.ends]):
            at = found[0]
            output.stop_token, output.finish = tokens[at], "stop"
            output.token_ids = tokens = tokens[:at]
        if self.cached:
            output.cached_tokens = self.cached
        if self.told is not None:
            output.prompt, self.told = self.told, None
        if self.best is not None:
            output.logprobs = [_certain_logprob(token, self.best) for token in tokens]
        return output


def _certain_prompt(ids: list[int], best: int) -> list[PromptToken]:
    texts = [EchoDecoder().push([token]).encode() for token in ids]
    made = [PromptToken(ids[0], texts[0])]
    for token, text in zip(ids[1:], texts[1:], strict=True):
        made.append(PromptToken(token, text, 0.0, 1, ((token, text, 0.0),) if best else ()))
    return made


def _certain_logprob(token: int, best: int) -> TokenLogprob:
    text = EchoDecoder().push([token]).encode()
    return TokenLogprob(text, 0.0, ((text, 0.0),) if best else ())


# ---------------------------------------------------------------- adapters, prefix cache


def transform_of(adapter: AdapterSpec) -> str:
    """Return the adapter's key of TRANSFORMS.

    Raises RequestError if it is not one of this engine.
    """
    file = Path(adapter.path) / "adapter_config.json"
    try:
        said = json.loads(file.read_bytes())
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}", param="lora_path") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{file} is not valid JSON", param="lora_path") from None
    if not isinstance(said, dict):
        raise RequestError(f"{file} has to be a JSON object", param="lora_path")
    kind = str(said.get("transform", "upper"))
    if kind not in TRANSFORMS:
        known = ", ".join(TRANSFORMS)
        raise RequestError(f"{file}: transform has to be one of {known}", param="lora_path")
    return kind


def transform_token(token: int, transform: Transform) -> int:
    """Return the transformed token, or the same token if the result is not a single character."""
    text = transform(chr(token))
    return ord(text) if len(text) == 1 else token


class EchoCache:
    """A prefix cache for `tokens` tokens; reading a token that is not cached takes `token_s`.

    It stores hashes of whole token blocks, each over the block and everything before it, as in vLLM
    and the paged cache of transformers; each adapter and each salt has separate blocks. The least
    recently used blocks are evicted first.
    """

    def __init__(self, tokens: int, token_s: float) -> None:
        self.tokens = tokens
        self._token_s = token_s
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def read_prompt(self, job: Job) -> tuple[int, float]:
        """Return the number of cached prompt tokens and the time to read the others, in seconds.

        The last token is never cached, because the first token of the answer is computed from it.
        """
        ids, last, found, known = job.prompt_ids, hash((job.adapter, job.cache_salt)), 0, True
        chain = []
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            last = hash((last, tuple(ids[at : at + BLOCK])))
            chain.append(last)
            known = known and last in self._blocks
            found += BLOCK * known
        self._keep_blocks(chain)
        cached = min(found, (len(ids) - 1) // BLOCK * BLOCK)
        return cached, (len(ids) - cached) * self._token_s

    def _keep_blocks(self, chain: list[int]) -> None:
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) * BLOCK > self.tokens:
            self._blocks.popitem(last=False)
