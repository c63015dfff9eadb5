"""What a request is before the engine gets it: token ids, a compiled grammar, or a refusal.

What takes long is done in threads: long prompts one after the other in one, for each may take a
gigabyte while it is tokenised; long texts of which only the tokens are asked in another; grammars
in two of their own, so that whoever sends explosive ones waits for himself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from servekit.engines.base import Engine, TooManyTokens
from servekit.errors import ContextLengthExceeded, RequestError
from servekit.wire.messages import ChatMessage, Generate, ModelInfo
from servekit.worker.capability import check

#: Prompts longer than this are tokenised off the event loop: about 5 ms of work.
LONG_PROMPT_CHARS = 16_384
#: Tokens of a text that are told one by one, as many as a client may send: each is an object here
#: and at the gateway.
MAX_TOKENS_TOLD = 2**20
#: Grammars that are compiled at once.
COMPILERS = 2
#: How long a grammar may take, the wait for its turn included. The engine has limits of its own,
#: which end the work; this one ends the wait on a machine that is too busy.
COMPILE_TIMEOUT_S = 5.0


class Prepared(msgspec.Struct):
    """What a task needs: `ids` and `constraint` to generate, `inputs` to embed, or an answer."""

    ids: list[int] = []
    constraint: object | None = None
    inputs: list[list[int]] = []
    text: str = ""


class Intake:
    """Prepares requests for one engine; `room` is how many tokens the context has for one."""

    def __init__(self, engine: Engine, info: ModelInfo, room: Callable[[Generate], int]) -> None:
        self._engine = engine
        self._info = info
        self._room = room
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompt")
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="tokens")

    def takes_long(self, request: Generate) -> bool:
        """Whether it is too much work for the event loop."""
        slow = request.params.grammar is not None or bool(request.tools)
        return slow or _length(request) > LONG_PROMPT_CHARS

    def prepare(self, request: Generate) -> Prepared:
        """From any thread. Raises RequestError."""
        check(request, self._info, self._engine.spec)
        match request.task:
            case "detokenize":
                return self._detokenized(request)
            case "tokenize":
                return Prepared(self._told(request))
            case "embed":
                return Prepared(inputs=self._inputs(request.inputs))
            case _:
                return Prepared(self._prompt(request), self._constraint(request))

    async def prepare_aside(self, request: Generate, wanted: Callable[[], bool]) -> Prepared:
        """In another thread, unless it is not `wanted` any more at its turn. Raises RequestError.

        `wanted` is called in that thread. What is not wanted is prepared as nothing.
        """

        def prepare() -> Prepared:
            return self.prepare(request) if wanted() else Prepared()

        loop = asyncio.get_running_loop()
        if request.params.grammar is None:
            return await loop.run_in_executor(self._thread_for(request), prepare)
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await loop.run_in_executor(self._compilers, prepare)
        except TimeoutError:
            raise RequestError(
                f"the grammar was not compiled within {COMPILE_TIMEOUT_S:g} s; simplify it",
                param=request.params.grammar.param,
            ) from None

    def _thread_for(self, request: Generate) -> ThreadPoolExecutor | None:
        """None: one of the event loop's own, where the text is short and something else is not."""
        if _length(request) <= LONG_PROMPT_CHARS:
            return None
        return self._reader if request.task in ("generate", "embed") else self._teller

    def _prompt(self, request: Generate) -> list[int]:
        """What is to be gone on with; refused early where it is far longer than the context."""
        context, params = self._room(request), request.params
        try:
            return self._encode(request, context)
        except TooManyTokens as error:
            found = f"more than {error.count}"
            raise _too_long(context, found, params.max_tokens) from None

    def _encode(self, request: Generate, limit: int | None = None) -> list[int]:
        if request.messages is not None:
            return self._engine.codec.render_chat(
                request.messages, request.tools, request.template, request.continues, limit
            )
        if isinstance(request.prompt, str):
            return self._engine.codec.encode(request.prompt, limit)
        ids = request.prompt or []
        self._check_ids(ids, "prompt")
        return ids

    def _constraint(self, request: Generate) -> object | None:
        grammar = request.params.grammar
        return None if grammar is None else self._engine.constrain(grammar, request.emitted)

    def _told(self, request: Generate) -> list[int]:
        try:
            ids = self._encode(request, MAX_TOKENS_TOLD)
        except TooManyTokens as error:
            raise _too_many_to_tell(f"more than {error.count}") from None
        if len(ids) > MAX_TOKENS_TOLD:
            raise _too_many_to_tell(str(len(ids)))
        return ids

    def _detokenized(self, request: Generate) -> Prepared:
        ids = request.prompt if isinstance(request.prompt, list) else []
        self._check_ids(ids, "tokens")
        decoder = self._engine.codec.decoder()
        return Prepared(ids, text=decoder.push(ids) + decoder.flush())

    def _inputs(self, inputs: Sequence[str | list[int]]) -> list[list[int]]:
        if not inputs:
            raise RequestError("there is no input", param="input")
        several = len(inputs) > 1
        return [
            self._input(one, f"input[{index}]" if several else "input")
            for index, one in enumerate(inputs)
        ]

    def _input(self, one: str | list[int], name: str) -> list[int]:
        limit = self._info.max_context
        try:
            ids = self._engine.codec.encode(one, limit) if isinstance(one, str) else one
        except TooManyTokens as error:
            raise _input_too_long(name, f"more than {error.count}", limit) from None
        if not ids:
            raise RequestError(f"{name} is empty", param="input")
        self._check_ids(ids, "input")
        if len(ids) > limit:
            raise _input_too_long(name, str(len(ids)), limit)
        return ids

    def _check_ids(self, ids: list[int], param: str) -> None:
        size = self._engine.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise RequestError(f"token ids must be between 0 and {size - 1}", param=param)


def completion_limit(
    prompt: int, asked: int | None, limits: tuple[int, int | None], *, clamp: bool = False
) -> int:
    """How many tokens may be generated; raises RequestError where none or too few fit.

    `clamp`: as many as fit, where that is fewer than asked for.
    """
    context, default = limits
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    room = context - prompt
    if room < 1 or (asked is not None and asked > room and not clamp):
        raise _too_long(context, str(prompt), asked)
    if asked is None:
        return min(room, default or room)
    return max(1, min(asked, room)) if clamp else asked


def _too_long(context: int, prompt: str, asked: int | None) -> ContextLengthExceeded:
    wanted = f" and max_tokens is {asked}" if asked is not None else ""
    return ContextLengthExceeded(
        f"this model's context is {context} tokens; the prompt has {prompt}{wanted}. "
        "Shorten the prompt or ask for fewer tokens",
        param="messages" if asked is None else "max_tokens",
    )


def _too_many_to_tell(tokens: str) -> RequestError:
    return RequestError(
        f"the text has {tokens} tokens; at most {MAX_TOKENS_TOLD} are told at once",
        param="prompt",
    )


def _input_too_long(name: str, tokens: str, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{name} has {tokens} tokens, and this model reads at most {limit}. Shorten it",
        param="input",
    )


def _length(request: Generate) -> int:
    """Characters, and for ids that are to become text, as many tokens."""
    if request.inputs:
        return sum(map(len, request.inputs))
    if request.messages is not None:
        tools = sum(len(str(tool)) for tool in request.tools)
        return tools + sum(map(_turn_length, request.messages))
    if isinstance(request.prompt, str) or request.task == "detokenize":
        return len(request.prompt or ())
    return 0


def _turn_length(message: ChatMessage) -> int:
    calls = sum(len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning or "") + calls
