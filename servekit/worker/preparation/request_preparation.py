"""Preparation of requests for the engine: token ids, grammars and recordings, or a refusal.

Slow work runs in threads, so that the event loop delays no stream. Long prompts are tokenised one
after another in a single thread, because each may take a gigabyte meanwhile. Long texts to be only
tokenised have another thread; shorter texts and grammars have others. The engine limits the cost of
a grammar and the number of requests that wait for compilation; no timeout runs here while a request
waits for its turn or its prompt.
"""

from __future__ import annotations

import asyncio
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from servekit.engines.api.base import Engine, MediaPrompt, TooManyTokens
from servekit.errors import ContextLengthExceeded, RequestError, Unsupported
from servekit.protocol.messages import ChatMessage, Continuation, Generate, ModelInfo
from servekit.worker.preparation.input_encoding import InputEncoder
from servekit.worker.preparation.request_validation import check_request

#: Texts longer than this wait for one another.
LONG_PROMPT_CHARS = 16_384
#: Texts longer than this are tokenised off the event loop, if the codec has no `quick_chars`.
QUICK_CHARS = 4096
#: Maximum number of threads that tokenise shorter texts, and half of the cores at most.
TOKENIZERS = 4
#: Maximum number of tokens listed one by one, equal to the maximum that a client may send: each is
#: an object here and in the gateway.
MAX_TOKENS_TOLD = 2**20
#: Parameter named in the error about a prompt that is too long, by the requested `max_tokens`.
_PARAMS = {None: "messages", 0: "prompt"}
#: Number of threads that compile grammars; most of them wait for another compilation.
COMPILERS = 64


class Prepared(msgspec.Struct):
    """A prepared request: `ids` to generate, with what goes with them, `inputs`, or an answer."""

    ids: list[int] = []
    media: object | None = None
    constraint: object | None = None
    banned: tuple[tuple[int, ...], ...] = ()
    inputs: list[list[int]] = []
    types: list[list[int]] = []  # of pairs of texts in `inputs`
    recording: object | None = None
    text: str = ""


class RequestPreparer:
    """Preparer of requests for one engine; `room` returns a request's context size in tokens."""

    def __init__(self, engine: Engine, info: ModelInfo, room: Callable[[Generate], int]) -> None:
        self._engine = engine
        self._info = info
        self._room = room
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        half = len(os.sched_getaffinity(0)) // 2
        self._readers = ThreadPoolExecutor(min(TOKENIZERS, max(1, half)), thread_name_prefix="text")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompt")
        self._inputs = InputEncoder(engine, info, self._readers)
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="tokens")

    def takes_long(self, request: Generate) -> bool:
        """Return whether preparation is too slow for the event loop."""
        slow = request.params.grammar is not None or bool(request.tools)
        quick = getattr(self._engine.codec, "quick_chars", QUICK_CHARS)
        return slow or _request_length(request) > quick

    def prepare(self, request: Generate) -> Prepared:
        """Validate and prepare a request, in any thread. Raises RequestError."""
        check_request(request, self._info, self._engine.spec)
        match request.task:
            case "generate":  # nearly all requests, so it is compared first
                prepared = self._prepare_prompt(request)
                prepared.constraint = self._compile_grammar(request)
                return prepared
            case "detokenize":
                return self._detokenize_ids(request)
            case "tokenize":
                return Prepared(self._tokenize_text(request))
            case "transcribe":
                return Prepared(recording=self._read_recording(request))
            case _:
                spread = self._thread_for(request) is not self._readers
                inputs, types = self._inputs.encode_input(request, spread=spread)
                return Prepared(inputs=inputs, types=types)

    async def prepare_aside(self, request: Generate, wanted: Callable[[], bool]) -> Prepared:
        """Prepare a request in another thread. Raises RequestError.

        `wanted` is called in that thread; if it returns False, an empty result is returned.
        """

        def prepare_request() -> Prepared:
            return self.prepare(request) if wanted() else Prepared()

        def prepare_prompt() -> Prepared:
            check_request(request, self._info, self._engine.spec)
            return self._prepare_prompt(request) if wanted() else Prepared()

        def compile_grammar() -> object | None:
            return self._compile_grammar(request) if wanted() else None

        loop = asyncio.get_running_loop()
        if request.params.grammar is None or request.task != "generate":
            return await loop.run_in_executor(self._thread_for(request), prepare_request)
        if _request_length(request) <= LONG_PROMPT_CHARS:
            return await loop.run_in_executor(self._compilers, prepare_request)
        prepared = await loop.run_in_executor(self._reader, prepare_prompt)
        prepared.constraint = await loop.run_in_executor(self._compilers, compile_grammar)
        return prepared

    def _thread_for(self, request: Generate) -> ThreadPoolExecutor:
        if _request_length(request) <= LONG_PROMPT_CHARS:
            return self._readers
        return self._teller if request.task in ("tokenize", "detokenize") else self._reader

    def _prepare_prompt(self, request: Generate) -> Prepared:
        banned = self._banned_sequences(request) if request.params.bad_words else ()
        if not _has_media(request):
            return Prepared(self._prompt_ids(request), banned=banned)
        if request.params.truncate_prompt:
            raise Unsupported(
                "truncate_prompt_tokens: a conversation with images or recordings cannot be cut",
                param="truncate_prompt_tokens",
            )
        ids, inputs = self._encode_media(request)
        if (began := request.continuation) is not None and began.prompt:
            # The template may have told another time. The media must stay in their places.
            first = unpack_ids(began.prompt)
            ids = first if len(first) == len(ids) else ids
        if request.params.prompt_logprobs is not None:
            _check_told(len(ids), request.params.prompt_logprobs + 1)
        return Prepared(ids, inputs, banned=banned)

    def _encode_media(self, request: Generate) -> MediaPrompt:
        return self._engine.encode_media(
            request.messages or [], request.tools, request.template, request.continues
        )

    def _prompt_ids(self, request: Generate) -> list[int]:
        """Return the prompt's ids, with an early error if it is far longer than the context."""
        context, params = self._room(request), request.params
        if params.truncate_prompt:
            return self._truncated_ids(request, context)
        try:
            ids = self._encode_prompt(request, context)
            if params.prompt_logprobs is not None:
                _check_told(len(ids), params.prompt_logprobs + 1)
            return ids
        except TooManyTokens as error:
            found = f"more than {error.count}"
            raise _too_long(context, found, params.max_tokens) from None

    def _truncated_ids(self, request: Generate, context: int) -> list[int]:
        """Return the last tokens of the prompt: as many as requested, or as fit."""
        kept = request.params.truncate_prompt
        if kept < 0:
            asked = request.params.max_tokens
            none = asked == 0 and self._engine.fills_context
            kept = max(1, context - (0 if none else asked or 1))
        try:
            ids = self._encode_prompt(request, MAX_TOKENS_TOLD)[-kept:]
        except TooManyTokens as error:
            raise _too_long(context, f"more than {error.count}", None) from None
        if request.params.prompt_logprobs is not None:
            _check_told(len(ids), request.params.prompt_logprobs + 1)
        return ids

    def _banned_sequences(self, request: Generate) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of bad words, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in request.params.bad_words:
            for text in (word, " " + word.lstrip(" ")):
                if ids := tuple(self._engine.codec.encode_plain(text)):
                    found[ids] = None
        return tuple(found)

    def _encode_prompt(self, request: Generate, limit: int | None = None) -> list[int]:
        if (began := request.continuation) is not None:
            if began.prompt:
                return unpack_ids(began.prompt)
            limit = None  # `limit_of_continuation` decides whether it fits
        if request.messages is not None:
            return self._engine.codec.render_chat(
                request.messages, request.tools, request.template, request.continues, limit
            )
        if isinstance(request.prompt, str):
            return self._engine.codec.encode(request.prompt, limit)
        ids = request.prompt or []
        self._inputs.check_ids(ids, "prompt")
        return ids

    def _compile_grammar(self, request: Generate) -> object | None:
        grammar = request.params.grammar
        return None if grammar is None else self._engine.constrain(grammar, request.emitted)

    def _tokenize_text(self, request: Generate) -> list[int]:
        try:
            if _has_media(request):
                ids = self._encode_media(request).ids
            else:
                ids = self._encode_prompt(request, MAX_TOKENS_TOLD)
        except TooManyTokens as error:
            raise _too_many_to_tell(f"more than {error.count}") from None
        if len(ids) > MAX_TOKENS_TOLD:
            raise _too_many_to_tell(str(len(ids)))
        return ids

    def _read_recording(self, request: Generate) -> object:
        if request.speech is None:
            raise RequestError("there is no recording", param="file")
        return self._engine.read_recording(request.body, request.speech)

    def _detokenize_ids(self, request: Generate) -> Prepared:
        ids = request.prompt if isinstance(request.prompt, list) else []
        self._inputs.check_ids(ids, "tokens")
        decoder = self._engine.codec.decoder()
        return Prepared(ids, text=decoder.push(ids) + decoder.flush())


def completion_limit(
    prompt: int,
    asked: int | None,
    limits: tuple[int, int | None],
    clamp: bool = False,
    fills: bool = False,
) -> int:
    """Return how many tokens may be generated; raise RequestError if none or too few fit.

    With `clamp`, a request for more tokens than fit is reduced. For a request of zero tokens the
    engine generates one that is not sent; `fills` is the engine's `fills_context`.
    """
    context, default = limits
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    room = context - prompt
    if asked == 0:
        if room < (0 if fills else 1):
            raise _too_long(context, str(prompt), asked, fills=fills)
        return 1
    if room < 1 or (asked is not None and asked > room and not clamp):
        raise _too_long(context, str(prompt), asked)
    if asked is None:
        return min(room, default or room)
    return max(1, min(asked, room)) if clamp else asked


def limit_of_continuation(prompt: int, began: Continuation, limits: tuple[int, int | None]) -> int:
    """Return the total token limit of a completion that another worker has begun.

    The limit is the first worker's, or what fits here. It is 0 or less if the prompt itself does
    not fit.
    """
    return min(began.max_tokens, limits[0] - prompt)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids for `Continuation.prompt`, as little-endian 32-bit integers."""
    found = array("I", ids)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def unpack_ids(ids: bytes) -> list[int]:
    """Return the ids that `pack_ids` has packed. Raises ValueError."""
    found = array("I", ids)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def _too_long(
    context: int, prompt: str, asked: int | None, *, fills: bool = True
) -> ContextLengthExceeded:
    wanted = f" and max_tokens is {asked}" if asked is not None else ""
    remedy = "Shorten the prompt or ask for fewer tokens"
    if asked == 0:
        own = "" if fills else ", and its engine needs room for one more, even with max_tokens 0"
        wanted, remedy = own, "Shorten the prompt"
    return ContextLengthExceeded(
        # clients look for the words before the number
        f"this model's maximum context length is {context} tokens; the prompt has {prompt}{wanted}."
        f" {remedy}",
        param=_PARAMS.get(asked, "max_tokens"),
    )


def _check_told(tokens: int, each: int) -> None:
    """Raise RequestError if a prompt has more log probabilities than may be sent at once."""
    if tokens * each > MAX_TOKENS_TOLD:
        raise RequestError(
            f"the prompt has {tokens} tokens, and {each} log probabilities of each are over the "
            f"limit of {MAX_TOKENS_TOLD}; ask for fewer, or shorten it",
            param="logprobs",
        )


def _too_many_to_tell(tokens: str) -> RequestError:
    return RequestError(
        f"the text has {tokens} tokens; at most {MAX_TOKENS_TOLD} are returned at once",
        param="prompt",
    )


def _request_length(request: Generate) -> int:
    """Return the number of characters, or the number of token ids to be decoded."""
    if request.inputs:
        times = len(request.inputs) if len(request.queries) == 1 else 1
        return sum(map(len, request.inputs)) + times * sum(map(len, request.queries))
    if request.messages is not None:
        turns = sum(map(_turn_length, request.messages))
        return turns + sum(len(str(tool)) for tool in request.tools) if request.tools else turns
    if isinstance(request.prompt, str) or request.task == "detokenize":
        return len(request.prompt or ())
    # to decode a recording takes as long as any long text
    return LONG_PROMPT_CHARS + 1 if request.task == "transcribe" else 0


def _has_media(request: Generate) -> bool:
    for message in request.messages or ():  # noqa: SIM110 - a generator would cost three times this
        if message.media:
            return True
    return False


def _turn_length(message: ChatMessage) -> int:
    own = len(message.content) + len(message.reasoning or "")
    if message.media:  # to decode them takes as long as any long text
        own += LONG_PROMPT_CHARS + 1
    if not message.tool_calls:  # nearly all messages
        return own
    return own + sum(len(call.arguments) for call in message.tool_calls)
