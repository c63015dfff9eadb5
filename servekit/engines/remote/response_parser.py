"""Parser of an endpoint's answer: framed text, counts and the end. No field of it is trusted.

Frame marks in the endpoint's text are replaced, so that data never becomes a call.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from servekit.engines.api.text_engine import TextOutput
from servekit.engines.remote.errors import wrong_answer
from servekit.engines.remote.schemas import (
    Called,
    Choice,
    Function,
    Said,
    Usage,
    convert_logprobs,
    decode_chunk,
    valid_count,
)
from servekit.errors import EndpointFailed, RequestError
from servekit.protocol.messages import UNKNOWN_TOKEN, Generate, TokenLogprob
from servekit.protocol.tool_formats import ARGUMENTS, CALL, MARKS, NAME, TEXT, THOUGHT

#: For estimates if the endpoint does not count.
_CHARS_PER_TOKEN = 4
_UNMARKED = dict.fromkeys(map(ord, MARKS), "\N{REPLACEMENT CHARACTER}")


class ResponseParser:
    """An answer in progress: `add_chunk` adds to it, `piece` returns the new output.

    An answer of more than `most_chars` characters is an error. Raises EndpointFailed, or
    RequestError if the endpoint blames the request.
    """

    def __init__(self, request: Generate, prompt_tokens: int, most_chars: int) -> None:
        self.finish: Literal["stop", "length"] | None = None
        self.counted = False  # the endpoint has reported the counts
        self._request = request
        self._estimate = prompt_tokens
        self._counts = (0, 0)
        self._cached = 0  # of the prompt's tokens
        self._left = most_chars
        self._chars = 0
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._part = TEXT
        self._calls: dict[int, str] = {}  # ids of the calls by index
        self._argued = True  # the last call has arguments
        self._stop = ""
        self._before = len(request.emitted)  # tokens of another worker
        # Not sent to the endpoint, which repeats it.
        self._again = request.answered[len(request.answered.rstrip()) :]
        self._tokens = 0  # in `_pieces`

    # ---- what comes

    def add_chunk(self, data: bytes) -> None:
        """Add one chunk of a stream, or a whole answer."""
        chunk = decode_chunk(data)
        self._store_counts(chunk.usage)
        for choice in chunk.choices or ():
            if not choice.index and self.finish is None:
                self._take_choice(choice)

    def _store_counts(self, usage: Usage | None) -> None:
        """Store the counts; invalid ones are ignored."""
        if usage is None:
            return
        prompt, completion = valid_count(usage.prompt_tokens), valid_count(usage.completion_tokens)
        if prompt is not None and completion is not None:
            self._counts, self.counted = (prompt, completion), True
            self._cached = usage.cached_tokens

    def _take_choice(self, choice: Choice) -> None:
        pieces = len(self._pieces)
        if self._request.messages is None:
            self._keep_text(choice.text or "")  # without frames
        for said in (choice.delta, choice.message):
            if said is not None and self._request.messages is not None:
                self._take_message(said)
        self._tokens += len(self._pieces) > pieces  # endpoints send each token by itself
        if choice.logprobs and self._request.params.logprobs is not None:
            self._logprobs += convert_logprobs(choice.logprobs)
        if choice.finish_reason:  # some send "" before the end
            self._end_answer(choice.finish_reason, choice.stop_reason)

    def _take_message(self, said: Said) -> None:
        thought = said.reasoning_content or said.reasoning
        if thought and isinstance(thought, str):
            self._write_part(THOUGHT, thought)
        for part, text in _list_texts(said.content):
            self._write_part(part, text)
        if said.refusal:
            self._write_part(TEXT, said.refusal)
        for call in said.tool_calls or ():
            self._take_call(call)

    def _take_call(self, call: Called) -> None:
        function = call.function or Function()
        index = self._call_index(call, function)
        if index not in self._calls:
            self._begin_call(index, call.id or "", function.name or "")
        elif index != len(self._calls) - 1 or self._part != ARGUMENTS:
            raise wrong_answer("it continues a tool call after the next has started")
        arguments = function.arguments
        if arguments:
            if not isinstance(arguments, str):
                arguments = msgspec.json.encode(arguments).decode()
            self._argued = True
            self._keep_text(arguments.translate(_UNMARKED))

    def _call_index(self, call: Called, function: Function) -> int:
        """Return the index of a call: by its id, otherwise by its index; a new call is the next."""
        ids = list(self._calls.values())
        if call.id and call.id in ids:
            return ids.index(call.id)
        if not ids or (call.id and function.name):
            return len(ids)
        return len(ids) - 1 if call.index is None else min(max(0, call.index), len(ids))

    def _begin_call(self, index: int, id: str, name: str) -> None:
        if not self._request.tools:
            raise wrong_answer("it calls a tool, and was offered none")
        if not name:
            raise wrong_answer("it calls a tool without a name")
        self._close_call()
        self._calls[index] = id
        self._part, self._argued = ARGUMENTS, False
        head = (id.translate(_UNMARKED), name.translate(_UNMARKED))
        self._keep_text(f"{CALL}{head[0]}{NAME}{head[1]}{ARGUMENTS}")

    def _close_call(self) -> None:
        """Complete a call without arguments with an empty object."""
        if not self._argued:
            self._keep_text("{}")
            self._argued = True

    def _write_part(self, part: str, text: str) -> None:
        if not text:
            return
        if part != self._part:
            self._close_call()
            self._part = part
            self._keep_text(part)
        self._keep_text(text.translate(_UNMARKED))

    def _keep_text(self, text: str) -> None:
        if self._again:
            text = self._drop_repeated(text)
        if not text:
            return
        self._chars += len(text)
        if self._chars > self._left:
            raise wrong_answer(f"it is longer than {self._left} characters")
        self._pieces.append(text)

    def _drop_repeated(self, text: str) -> str:
        """Drop the white space that ended the text of another worker."""
        while text and self._again and text[0] == self._again[0]:
            text, self._again = text[1:], self._again[1:]
        if text:
            self._again = ""
        return text

    # ---- its end

    def _end_answer(self, reason: str, stop: Any) -> None:
        if reason == "content_filter":
            raise RequestError("the endpoint's content filter cut the answer off")
        self._close_call()
        self.finish = "length" if reason == "length" else "stop"
        if isinstance(stop, str) and stop in self._request.params.stop:
            self._stop = stop

    def close(self, *, done: bool) -> None:
        """End the answer. `done`: the stream said [DONE].

        Raises EndpointFailed if the answer is incomplete.
        """
        if self.finish is not None:
            return
        if not done:
            raise EndpointFailed("the endpoint's stream broke off before its end")
        if not self._chars:
            raise wrong_answer("it has no choices")
        self._close_call()
        self.finish = "stop"

    @property
    def empty(self) -> bool:
        """True if there is no new output."""
        return not (self._pieces or self._logprobs)

    def piece(self, job_id: int, *, last: bool = False) -> TextOutput:
        """Return the output since the last call."""
        text, self._pieces = "".join(self._pieces), []
        scores, self._logprobs = self._logprobs, []
        ids, self._tokens = [UNKNOWN_TOKEN] * self._tokens, 0
        output = TextOutput(job_id, ids, text=text, logprobs=scores or None)
        output.prompt_tokens = self.prompt_tokens if self.counted else 0
        if last:
            output.finish, output.stop = self.finish, self._stop
            output.prompt_tokens = self.prompt_tokens
            output.completion_tokens = self.completion_tokens
            output.cached_tokens = min(self._cached, self.prompt_tokens)
        return output

    @property
    def prompt_tokens(self) -> int:
        """The endpoint's count of prompt tokens, or an estimate if it reports none."""
        return max(0, self._counts[0] - self._before) if self.counted else self._estimate

    @property
    def completion_tokens(self) -> int:
        """The endpoint's count of completion tokens, or an estimate if it reports none."""
        if self.counted:
            return self._before + self._counts[1]
        return self._before + math.ceil(self._chars / _CHARS_PER_TOKEN)


def _list_texts(content: str | list[Any] | None) -> list[tuple[str, str]]:
    """Return the text parts of a message, some of which are thoughts in Mistral's format."""
    if not isinstance(content, list):
        return [(TEXT, content or "")]
    found: list[tuple[str, str]] = []
    for part in content:
        if not isinstance(part, dict):
            continue
        if isinstance(text := part.get("text"), str):
            found.append((TEXT, text))
        elif isinstance(thinking := part.get("thinking"), list):
            found += [(THOUGHT, text) for _, text in _list_texts(thinking)]
    return found
