"""OpenAI's answers to chats and completions.

A stream's commonest events differ in their text only, and are made from templates of bytes.
"""

from __future__ import annotations

import itertools
import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from servekit.gateway.generation.generation import Choice, Generation, GenerationChunk
from servekit.gateway.generation.stream_writer import ResponseEncoder
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import Prompt, PromptToken, TokenLogprob

_encode = msgspec.json.Encoder().encode
#: 64 random bits, which make ids of several gateways differ: letters and digits.
_PROCESS = secrets.token_urlsafe(8).translate({ord("-"): "A", ord("_"): "B"})
_numbers = itertools.count(secrets.randbits(16))

_USAGE = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'
DONE = b"data: [DONE]\n\n"
_WHOLE_CHAT = (
    b'{"id":"%b","object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,'
    b'"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":null,'
    b'"finish_reason":"%b"}],"usage":%b}'
)
_WHOLE_COMPLETION = (
    b'{"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":[{"index":0,'
    b'"text":%b,"logprobs":null,"finish_reason":"%b"}],"usage":%b}'
)
#: Replaces minus infinity, which JSON lacks; OpenAI's own lowest value.
LOWEST = -9999.0


def new_id(prefix: str) -> str:
    """Return a fresh id in OpenAI's format."""
    return f"{prefix}{_PROCESS}{next(_numbers):x}"


def event(data: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def usage(generation: Generation) -> dict[str, Any]:
    """Return the token counts, without cached tokens if there are none."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if not generation.cached_tokens:
        return counts
    return {**counts, "prompt_tokens_details": {"cached_tokens": generation.cached_tokens}}


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """The token counts in the chunks of a stream: in the last one, or with `each` in all."""

    wanted: bool = False
    each: bool = False

    @property
    def frame(self) -> bytes | None:
        """The end of a chunk, if it is the same for all."""
        if self.each:
            return None
        return b',"usage":null}\n\n' if self.wanted else b"}\n\n"

    def encode_last(self, generation: Generation) -> bytes:
        """Return the end of a chunk without a `frame`."""
        return b',"usage":%b}\n\n' % _encode(self._count(generation))

    def describe(self, generation: Generation) -> dict[str, Any]:
        """Return the part of a chunk with the counts."""
        if self.each:
            return {"usage": self._count(generation)}
        return {"usage": None} if self.wanted else {}

    @staticmethod
    def _count(generation: Generation) -> dict[str, int]:
        prompt, completion = generation.prompt_tokens, generation.emitted_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def encode_usage(generation: Generation) -> bytes:
    """Return `usage` as JSON, quickly for a plain generation."""
    call, completion = generation.first, generation.completion_tokens
    if call.cached_tokens or not generation.plain:
        return _encode(usage(generation))
    return _USAGE % (call.prompt_tokens, completion, call.prompt_tokens + completion)


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


def stop_reason(generation: Generation, ended: GenerationChunk | Choice) -> dict[str, Any]:
    """Return vLLM's `stop_reason` for requests with `stop_token_ids`: the stop string or token.

    None means the end of the sequence, or the token limit.
    """
    if not generation.request.params.stop_token_ids:
        return {}
    token = ended.stop_token if ended.stop_token >= 0 else None
    return {"stop_reason": ended.stop or token}


class ChatEncoder(ResponseEncoder):
    """The answer to POST /v1/chat/completions."""

    def __init__(
        self, usage: StreamUsage, logprobs: bool, prompt_logprobs: int | None = None
    ) -> None:
        self._id = new_id("chatcmpl-")
        self._prompt_logprobs = prompt_logprobs
        self._created = int(time.time())
        self._usage = usage
        self._logprobs = logprobs

    def _head(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": generation.model}

    # ---- whole

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        choice = choices[0]
        rich = self._logprobs or generation.request.params.stop_token_ids
        if generation.plain and not rich:
            return _WHOLE_CHAT % (
                self._id.encode(),
                self._created,
                _encode(generation.model),
                _encode(choice.text),
                choice.finish.encode(),
                encode_usage(generation),
            )
        head = self._head(generation, "chat.completion")
        listed = [self._whole(generation, index, choice) for index, choice in enumerate(choices)]
        told = prompt_of(choices[0], self._prompt_logprobs)
        return _encode(head | {"choices": listed, "usage": usage(generation)} | told)

    def _whole(self, generation: Generation, index: int, choice: Choice) -> dict[str, Any]:
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
            **stop_reason(generation, choice),
        }

    # ---- streamed

    def encode_start(self, generation: Generation) -> bytes:
        head = _encode(self._head(generation, "chat.completion.chunk"))[:-1]
        self._before = b'data: %b,"choices":[{"index":' % head
        logprobs = b',"logprobs":null' if self._logprobs else b""
        self._after = b'}%b,"finish_reason":null}]' % logprobs
        if (last := self._usage.frame) is not None:
            self.frame = self._before + b'0,"delta":{"content":', self._after + last
        first = {"role": "assistant", "content": ""}
        count = generation.count
        return b"".join([self._chunk(generation, index, first) for index in range(count)])

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        return b"".join([data for chunk in chunks for data in self._of_chunk(generation, chunk)])

    def _of_chunk(self, generation: Generation, chunk: GenerationChunk) -> list[bytes]:
        events, index, logprobs = chunk.events, chunk.choice, chunk.logprobs
        if logprobs:  # they go with the first delta
            first = delta_of(events[0]) if events else {"content": ""}
            encoded = [self._chunk(generation, index, first, logprobs)]
            events = events[1:]
        else:
            encoded = []
        encoded += [self._of_event(generation, index, event) for event in events]
        if chunk.finish is not None:
            more = stop_reason(generation, chunk)
            encoded.append(self._chunk(generation, index, {}, [], chunk.finish, more))
        return encoded

    def _of_event(self, generation: Generation, index: int, event: Event) -> bytes:
        if type(event) is Text:
            name = b"content"
        elif type(event) is Reasoning:
            name = b"reasoning_content"
        else:
            return self._chunk(generation, index, delta_of(event))
        after = self.frame[1] if self.frame else self._after + self._usage.encode_last(generation)
        parts = self._before, index, name, _encode(event.text), after
        return b'%b%d,"delta":{"%b":%b%b' % parts

    def _chunk(
        self,
        generation: Generation,
        index: int,
        delta: dict[str, Any],
        logprobs: list[TokenLogprob] | None = None,
        finish: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        told = self._logprobs_of(logprobs) if logprobs else None
        choice = {
            "index": index,
            "delta": delta,
            **({"logprobs": told} if self._logprobs else {}),
            "finish_reason": finish,
            **(more or {}),
        }
        head = self._head(generation, "chat.completion.chunk") | {"choices": [choice]}
        return event(head | self._usage.describe(generation))

    def encode_end(self, generation: Generation) -> bytes:
        if not self._usage.wanted:
            return DONE
        head = self._head(generation, "chat.completion.chunk")
        return event(head | {"choices": [], "usage": usage(generation)}) + DONE

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


class CompletionEncoder(ResponseEncoder):
    """The answer to POST /v1/completions. With `echo`, each answer begins with its prompt.

    The worker supplies the echoed prompt if there are `logprobs`, or if it was sent as token ids.
    """

    def __init__(
        self,
        usage: StreamUsage,
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
        if echo or logprobs is not None:
            self._echoed: set[int] = set()  # choices whose stream has already echoed their prompt
            self._offsets: dict[int, int] = {}  # characters of each choice so far

    def _head(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": generation.model,
        }

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        if self._is_plain(generation):
            return _WHOLE_COMPLETION % (
                self._id.encode(),
                self._created,
                _encode(generation.model),
                _encode(choices[0].text),
                choices[0].finish.encode(),
                encode_usage(generation),
            )
        listed = [
            self._choice(
                index,
                self._prompt(generation, index, one.prompt) + one.text,
                one.logprobs,
                one.finish,
                one.prompt,
            )
            | stop_reason(generation, one)
            | prompt_of(one, self._prompt_logprobs)
            for index, one in enumerate(choices)
        ]
        return _encode(self._head(generation) | {"choices": listed, "usage": usage(generation)})

    def encode_start(self, generation: Generation) -> bytes:
        head = _encode(self._head(generation))[:-1]
        before = b'data: %b,"choices":[{"index":0,"text":' % head
        if (last := self._usage.frame) is not None and not self._logprobs:
            self.frame = before, b',"logprobs":null,"finish_reason":null}]' + last
        if not self._echo or generation.request.params.echo:
            return b""
        return b"".join(
            self._chunk(generation, index, self._prompt(generation, index), [], None)
            for index in range(generation.count)
        )

    def _prompt(self, generation: Generation, index: int, told: Prompt | None = None) -> str:
        """Return the text of a prompt: the client's text, or the worker's text of token ids."""
        if not self._echo:
            return ""
        prompt = generation.request.prompts[index // generation.request.n]
        if isinstance(prompt, str) and not generation.request.params.truncate_prompt:
            return prompt
        return "" if told is None else told.text

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        encoded = []
        for chunk in chunks:
            index, finish, logprobs = chunk.choice, chunk.finish, chunk.logprobs
            text = "".join([event.text for event in chunk.events if isinstance(event, Text)])
            told = self._new(chunk)
            if told is not None:
                text = self._prompt(generation, index, told) + text
            if text and finish and self._is_plain(generation):
                encoded.append(self.encode_text(generation, text))
                text = ""
            if text or logprobs or finish:
                more = stop_reason(generation, chunk) if finish else {}
                encoded.append(self._chunk(generation, index, text, logprobs, finish, more, told))
        return b"".join(encoded)

    def _is_plain(self, generation: Generation) -> bool:
        """Return whether the answer is only text; its end has a chunk of its own then."""
        if not generation.plain or self._echo or self._logprobs:
            return False
        return not generation.request.params.stop_token_ids

    def _new(self, chunk: GenerationChunk) -> Prompt | None:
        """Return the prompt of a stream's first chunk; a stream resumed elsewhere repeats it."""
        if chunk.prompt is None or not self._echo or chunk.choice in self._echoed:
            return None
        self._echoed.add(chunk.choice)
        return chunk.prompt

    def _chunk(
        self,
        generation: Generation,
        index: int,
        text: str,
        logprobs: list[TokenLogprob],
        finish: str | None,
        more: dict[str, Any] | None = None,
        prompt: Prompt | None = None,
    ) -> bytes:
        choice = self._choice(index, text, logprobs, finish, prompt) | (more or {})
        chunk = self._head(generation) | {"choices": [choice]}
        return event(chunk | self._usage.describe(generation))

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: list[TokenLogprob],
        finish: str | None,
        prompt: Prompt | None = None,
    ) -> dict[str, Any]:
        echoed = prompt.tokens if prompt is not None and self._echo else []
        told = self._encode_text(index, logprobs, echoed) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": finish}

    def _encode_text(
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

    def encode_end(self, generation: Generation) -> bytes:
        if not self._usage.wanted:
            return DONE
        return event(self._head(generation) | {"choices": [], "usage": usage(generation)}) + DONE


def _best(one: PromptToken, count: int) -> dict[str, float] | None:
    """Return the best alternatives to a prompt's token; None for the first, without context."""
    if one.logprob is None:
        return None
    best = one.best[:count]
    return {text.decode(errors="replace"): max(value, LOWEST) for _, text, value in best}
