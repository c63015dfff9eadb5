"""OpenAI's answers off the fast path: several choices, tools, reasoning, log probabilities.

Plain answers are written by `generation.openai_encoder`.
"""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec

from servekit.gateway.api.responder import ResponseEncoder
from servekit.gateway.generation.generation import Choice, Generation, GenerationChunk
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import Prompt, PromptToken, TokenLogprob

_encode = msgspec.json.Encoder().encode
_random_bits = random.Random().getrandbits  # seeded by the system; ids need not be secret

DONE = b"data: [DONE]\n\n"
#: Replaces minus infinity, which JSON lacks; OpenAI's own lowest value.
LOWEST = -9999.0


def new_id(prefix: str) -> str:
    """Return a fresh id in OpenAI's format."""
    return f"{prefix}{_random_bits(96):024x}"


def event(data: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def usage(turn: Generation) -> dict[str, Any]:
    """Return the token counts; like the fast path, without cached tokens if there are none."""
    prompt, completion = turn.prompt_tokens, turn.completion_tokens
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if not turn.cached_tokens:
        return counts
    return {**counts, "prompt_tokens_details": {"cached_tokens": turn.cached_tokens}}


def prompt_of(choice: Choice, best: int | None) -> dict[str, Any]:
    """Return vLLM's `prompt_logprobs` with the `best` most likely tokens; nothing for None."""
    if best is None or choice.prompt is None:
        return {}
    return {"prompt_logprobs": [_ranked(one, best) for one in choice.prompt.tokens]}


def _ranked(one: PromptToken, best: int) -> dict[str, Any] | None:
    """Return log probabilities by token id; the token itself may be among the best."""
    if one.logprob is None:
        return None
    told = {one.id: (one.token, one.logprob, one.rank)}
    for rank, (token, text, logprob) in enumerate(one.best[:best], 1):
        told.setdefault(token, (text, logprob, rank))
    return {
        str(token): {
            "logprob": max(logprob, LOWEST),
            "rank": rank,
            "decoded_token": text.decode(errors="replace"),
        }
        for token, (text, logprob, rank) in told.items()
    }


def stop_reason(turn: Generation, ended: GenerationChunk | Choice) -> dict[str, Any]:
    """Return vLLM's `stop_reason` for requests with `stop_token_ids`: the stop string or token.

    None means the end of the sequence, or the token limit.
    """
    if not turn.ask.params.stop_token_ids:
        return {}
    token = ended.stop_token if ended.stop_token >= 0 else None
    return {"stop_reason": ended.stop or token}


class ChatForm(ResponseEncoder):
    """The answer to POST /v1/chat/completions."""

    def __init__(self, *, usage: bool, logprobs: bool, prompt_logprobs: int | None = None) -> None:
        self._id = new_id("chatcmpl-")
        self._prompt_logprobs = prompt_logprobs
        self._created = int(time.time())
        self._usage = usage
        self._logprobs = logprobs

    def _head(self, turn: Generation, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": turn.model}

    # ---- whole

    def whole(self, turn: Generation, choices: list[Choice]) -> bytes:
        head = self._head(turn, "chat.completion")
        listed = [self._whole(turn, index, choice) for index, choice in enumerate(choices)]
        told = prompt_of(choices[0], self._prompt_logprobs)
        return _encode(head | {"choices": listed, "usage": usage(turn)} | told)

    def _whole(self, turn: Generation, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text if choice.text or not choice.calls else None,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [
                called(call.id, call.name, call.arguments) for call in choice.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs_of(choice.logprobs),
            "finish_reason": choice.finish,
            **stop_reason(turn, choice),
        }

    # ---- streamed

    def opening(self, turn: Generation) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(turn, index, first) for index in range(turn.ask.n))

    def events(self, turn: Generation, pieces: list[GenerationChunk]) -> bytes:
        return b"".join([chunk for piece in pieces for chunk in self._chunks(turn, piece)])

    def _chunks(self, turn: Generation, piece: GenerationChunk) -> list[bytes]:
        deltas = [delta_of(event) for event in piece.events]
        if piece.logprobs and not deltas:
            deltas = [{"content": ""}]
        chunks = [
            # the log probabilities of a chunk go with its first delta
            self._chunk(turn, piece.choice, delta, piece.logprobs if at == 0 else [])
            for at, delta in enumerate(deltas)
        ]
        if piece.finish is not None:
            more = stop_reason(turn, piece)
            chunks.append(self._chunk(turn, piece.choice, {}, [], piece.finish, more))
        return chunks

    def _chunk(
        self,
        turn: Generation,
        index: int,
        delta: dict[str, Any],
        logprobs: list[TokenLogprob] | None = None,
        finish: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs_of(logprobs) if logprobs else None,
            "finish_reason": finish,
            **(more or {}),
        }
        head = self._head(turn, "chat.completion.chunk") | {"choices": [choice]}
        return event(head | {"usage": None} if self._usage else head)

    def closing(self, turn: Generation) -> bytes:
        if not self._usage:
            return DONE
        head = self._head(turn, "chat.completion.chunk")
        return event(head | {"choices": [], "usage": usage(turn)}) + DONE

    def _logprobs_of(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": [logprob_of(one) for one in logprobs or ()], "refusal": None}


def called(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call of a whole message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def delta_of(event: Event) -> dict[str, Any]:
    """Return a chunk's delta for one event."""
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            return {"tool_calls": [{"index": index, **called(id, name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def logprob_of(one: TokenLogprob) -> dict[str, Any]:
    """Return a token's log probability in the chat format."""
    best = [_token(token, logprob) for token, logprob in one.best]
    return _token(one.token, one.logprob) | {"top_logprobs": best}


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": token.decode(errors="replace"),
        "logprob": max(logprob, LOWEST),
        "bytes": list(token),
    }


class CompletionForm(ResponseEncoder):
    """The answer to POST /v1/completions. With `echo`, each answer begins with its prompt.

    The worker supplies the echoed prompt if there are `logprobs`, or if it was sent as token ids.
    """

    def __init__(
        self,
        *,
        usage: bool,
        logprobs: int | None,
        echo: bool,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._id = new_id("cmpl-")
        self._created = int(time.time())
        self._usage = usage
        self._logprobs = logprobs is not None
        self._best = logprobs or 0
        self._echo = echo
        self._prompt_logprobs = prompt_logprobs
        self._echoed: set[int] = set()  # choices whose stream has already echoed their prompt
        self._offsets: dict[int, int] = {}  # characters of each choice so far

    def _head(self, turn: Generation) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": turn.model,
        }

    def whole(self, turn: Generation, choices: list[Choice]) -> bytes:
        listed = [
            self._choice(
                index,
                self._prompt(turn, index, one.prompt) + one.text,
                one.logprobs,
                one.finish,
                one.prompt,
            )
            | stop_reason(turn, one)
            | prompt_of(one, self._prompt_logprobs)
            for index, one in enumerate(choices)
        ]
        return _encode(self._head(turn) | {"choices": listed, "usage": usage(turn)})

    def opening(self, turn: Generation) -> bytes:
        if not self._echo or turn.ask.params.echo:
            return b""
        count = len(turn.ask.prompts) * turn.ask.n
        return b"".join(
            self._chunk(turn, index, self._prompt(turn, index), [], None) for index in range(count)
        )

    def _prompt(self, turn: Generation, index: int, told: Prompt | None = None) -> str:
        """Return the text of a prompt: the client's text, or the worker's text of token ids."""
        if not self._echo:
            return ""
        prompt = turn.ask.prompts[index // turn.ask.n]
        if isinstance(prompt, str) and not turn.ask.params.truncate_prompt:
            return prompt
        return "" if told is None else told.text

    def events(self, turn: Generation, pieces: list[GenerationChunk]) -> bytes:
        chunks = []
        for piece in pieces:
            text = "".join(event.text for event in piece.events if isinstance(event, Text))
            told = self._new(piece)
            if told is not None:
                text = self._prompt(turn, piece.choice, told) + text
            if text or piece.logprobs or piece.finish:
                args = (piece.choice, text, piece.logprobs, piece.finish)
                more = stop_reason(turn, piece) if piece.finish else {}
                chunks.append(self._chunk(turn, *args, more, told))
        return b"".join(chunks)

    def _new(self, piece: GenerationChunk) -> Prompt | None:
        """Return the prompt of a stream's first chunk; a stream resumed elsewhere repeats the
        prompt.
        """
        if piece.prompt is None or piece.choice in self._echoed or not self._echo:
            return None
        self._echoed.add(piece.choice)
        return piece.prompt

    def _chunk(
        self,
        turn: Generation,
        index: int,
        text: str,
        logprobs: list[TokenLogprob],
        finish: str | None,
        more: dict[str, Any] | None = None,
        prompt: Prompt | None = None,
    ) -> bytes:
        choice = self._choice(index, text, logprobs, finish, prompt) | (more or {})
        chunk = self._head(turn) | {"choices": [choice]}
        return event(chunk | {"usage": None} if self._usage else chunk)

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: list[TokenLogprob],
        finish: str | None,
        prompt: Prompt | None = None,
    ) -> dict[str, Any]:
        echoed = prompt.tokens if prompt is not None and self._echo else []
        told = self._tell(index, logprobs, echoed) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": finish}

    def _tell(
        self, index: int, logprobs: list[TokenLogprob], prompt: list[PromptToken]
    ) -> dict[str, Any]:
        """Return log probabilities in the completion format, an echoed prompt's first."""
        texts = [*(one.token for one in prompt), *(one.token for one in logprobs)]
        tokens = [text.decode(errors="replace") for text in texts]
        offsets, at = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [
                *(None if one.logprob is None else max(one.logprob, LOWEST) for one in prompt),
                *(max(one.logprob, LOWEST) for one in logprobs),
            ],
            "top_logprobs": [_best(one, self._best) for one in prompt]
            + [
                {token.decode(errors="replace"): max(value, LOWEST) for token, value in one.best}
                for one in logprobs
            ],
            "text_offset": offsets,
        }

    def closing(self, turn: Generation) -> bytes:
        if not self._usage:
            return DONE
        return event(self._head(turn) | {"choices": [], "usage": usage(turn)}) + DONE


def _best(one: PromptToken, count: int) -> dict[str, float] | None:
    """Return the best alternatives to a prompt's token; None for the first, without context."""
    if one.logprob is None:
        return None
    best = one.best[:count]
    return {text.decode(errors="replace"): max(value, LOWEST) for _, text, value in best}
