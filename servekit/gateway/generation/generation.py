"""API-neutral requests and answers, on which all but the simplest endpoints are built.

A `GenerationRequest` holds the request of any API. A `Generation` answers it with one
`InflightRequest` for each choice, through the same queue as any other request, and with a parser
that separates text, reasoning and tool calls.

    turn = Generation(router, ask)           # raises RequestError: nothing has been sent yet
    async for pieces in turn: ...            # or: choices = await turn.whole()
    turn.cancel()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from servekit.errors import RequestError, Unsupported
from servekit.gateway.http.request_limits import check_free
from servekit.gateway.routing.adapter_route import base_of
from servekit.gateway.routing.request import Deltas, InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.tool_parsing import (
    CallArguments,
    Event,
    Parser,
    Reasoning,
    Text,
    ToolCallStart,
    after_thoughts,
    begins_thinking,
    check_tools,
    choice_by_word,
    choose,
    is_json,
    parser,
    tool_grammar,
)
from servekit.gateway.tool_parsing import Choice as ToolChoice
from servekit.protocol.messages import (
    ChatMessage,
    Delta,
    Dialect,
    Grammar,
    ModelInfo,
    ModelStatus,
    Prompt,
    SamplingParams,
    TokenLogprob,
    ToolCall,
)
from servekit.protocol.tool_formats import FRAMED

Finish = Literal["stop", "length", "tool_calls"]
Tools = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """A client's request in API-neutral form. Exactly one of `messages` and `prompts` is set."""

    model: str
    params: SamplingParams
    messages: list[ChatMessage] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    n: int = 1  # choices for each prompt; with a seed, each gets the next one
    tools: Tools = field(default_factory=list)  # OpenAI's definitions
    #: Any of OpenAI's forms, or one word: "none", "auto", "required", or a tool's name.
    tool_choice: Any = None
    parallel: bool = True  # the model may call several tools at once
    template: dict[str, Any] = field(default_factory=dict)  # extra variables of the chat template
    continues: bool = False  # the last message is the beginning of the answer
    reasoning: bool = True  # separate reasoning from text
    calling: type[InflightRequest] = (
        InflightRequest  # class of the calls; a subclass can observe them
    )
    stream: bool = True
    follow: bool = False  # also wake for each new position in the queue
    session: str = ""  # as named by the client
    key: str = ""
    priority: int = 0
    timeout_s: float | None = None


class GenerationChunk(msgspec.Struct, gc=False):
    """New events of one choice. `finish` is set on its last chunk."""

    choice: int
    events: list[Event]
    logprobs: list[TokenLogprob] = []
    finish: Finish | None = None
    stop: str = ""  # the stop string that ended the choice, if any
    stop_token: int = -1  # the one of `stop_token_ids` that ended it; -1 if none
    prompt: Prompt | None = None  # with the first chunk, if it was asked for


class Choice:
    """A complete choice, collected from its chunks."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish = "stop"
        self.stop = ""
        self.stop_token = -1
        self.prompt: Prompt | None = None

    def add(self, piece: GenerationChunk) -> None:
        for event in piece.events:
            match event:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolCallStart(_, id, name):
                    self.calls.append(ToolCall(id, name, ""))
                case CallArguments(index, text):
                    call = self.calls[index]
                    self.calls[index] = replace(call, arguments=call.arguments + text)
        self.logprobs += piece.logprobs
        self.finish = piece.finish or self.finish
        self.stop = piece.stop
        self.stop_token = piece.stop_token
        self.prompt = self.prompt or piece.prompt


class Generation:
    """The answers to one `GenerationRequest`.

    The calls are opened at once: the constructor raises the errors of `Router.open`, and
    Unsupported.
    """

    def __init__(self, router: Router, ask: GenerationRequest) -> None:
        route = router.find(ask.model)
        info = route.status.info
        self.model = route.status.name
        self.ask = ask
        self.prompt_tokens = self.cached_tokens = 0  # cached ones are included in the former
        self.completion_tokens = 0
        check_free(ask.tools, ask.template, ask.params.grammar, router.access.rules.limits)
        self._choice = _choose(ask, route.status)
        self._dialect = dialect = Dialect() if info is None else _dialect(info, self._choice)
        thinking = begins_thinking(dialect, ask.template, ask.continues)
        self._news = asyncio.Event()
        self._calls = list(self._make_calls(thinking))
        self._parsers = [self._parser(thinking) for _ in self._calls]
        self._called = [False for _ in self._calls]
        self._written = ["" for _ in self._calls]  # the arguments of the last tool call
        self._prompts = [(0, 0) for _ in self._calls]  # prompt tokens, cached tokens
        self._left = set(range(len(self._calls)))
        self._open(router)

    def _parser(self, thinking: bool) -> Parser | None:
        """Return a parser for one choice; None if everything is text."""
        thinks = self.ask.reasoning and self.ask.messages is not None
        tools = self._choice.tools
        if self._dialect.tools == FRAMED and self.ask.messages is not None:
            return parser(self._dialect, tools=tools, reasoning=thinks)
        if not tools and not (thinks and (self._dialect.think_end or self._dialect.tools)):
            return None
        return parser(self._dialect, tools=tools, reasoning=thinks, thinking=thinking)

    def _make_calls(self, thinking: bool) -> Iterator[InflightRequest]:
        ask = self.ask
        more: dict[str, Any] = {}
        if self._choice.tools:
            more["tools"] = list(self._choice.tools)
            if self._dialect.tools == FRAMED:
                more["must_call"] = self._choice.mode == "required"
                more["one_call"] = self._choice.once or not ask.parallel
        if ask.template:
            more["template"] = ask.template
        if ask.continues:
            more["continues"] = True
        params = replace(ask.params, grammar=self._grammar(thinking))
        if self._choice.mode == "required":
            params = replace(params, stop=())  # a stop string must not cut the required call
        prompts: list[str | list[int] | None] = [*ask.prompts] or [None]
        for prompt in prompts:
            for index in range(ask.n):
                call = ask.calling(
                    ask.model, _seeded(params, index), prompt=prompt, messages=ask.messages,
                    stream=ask.stream, key=ask.key, priority=ask.priority, more=more,
                    session=ask.session,
                )  # fmt: skip
                call.sink = self._news.set
                yield call

    def _grammar(self, thinking: bool) -> Grammar | None:
        """Return the grammar of all the model's text: reasoning, then tool calls or an answer."""
        ask, grammar = self.ask, self.ask.params.grammar
        if self._dialect.tools == FRAMED:
            return grammar  # the engine handles tools and reasoning itself
        calls = tool_grammar(
            self._dialect, self._choice, parallel=ask.parallel, begun=thinking, answer=grammar
        )
        if calls is not None:
            return calls
        if grammar is not None and ask.messages is not None:
            return after_thoughts(self._dialect, grammar, thinking)
        return grammar

    def _open(self, router: Router) -> None:
        for call in self._calls:
            try:
                router.open(call, self.ask.timeout_s)
            except BaseException:
                self.cancel()
                raise
        if self.ask.follow:
            router.follow(self._calls[0])

    # ---- results

    @property
    def place(self) -> int | None:
        """Return the number of requests ahead, if that is followed; None once it runs."""
        return self._calls[0].place

    async def __aiter__(self) -> AsyncIterator[list[GenerationChunk]]:
        """Yield new chunks until all choices have ended; an empty list if only `place` has changed.

        Leaving early cancels the running calls. Raises RequestError if one of the calls fails.
        """
        try:
            while self._left:
                pieces = self._collect()
                if pieces or self.ask.follow:
                    yield pieces
                if self._left and not pieces:
                    await self._news.wait()
        finally:
            self.cancel()

    async def whole(self) -> list[Choice]:
        """Wait for all choices and return them."""
        choices = [Choice() for _ in self._calls]
        async for pieces in self:
            for piece in pieces:
                choices[piece.choice].add(piece)
        return choices

    @property
    def first(self) -> InflightRequest:
        """Return the call of the first choice."""
        return self._calls[0]

    def cancel(self) -> None:
        """Cancel all calls, because the client is gone or wants no more."""
        for call in self._calls:
            call.cancel()

    def _collect(self) -> list[GenerationChunk]:
        self._news.clear()
        return [
            self._piece(index, deltas)
            for index in sorted(self._left)
            if (deltas := self._calls[index].collect())
        ]

    def _piece(self, index: int, deltas: Deltas) -> GenerationChunk:
        text = "".join([delta.text for delta in deltas])
        last = deltas[-1]
        events = self._events(index, text, last)
        if self._choice.tools:
            self._note_calls(index, events)
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        self._count_prompt(index, last)
        prompt = deltas[0].prompt  # comes again after a stream has moved to another worker
        if last.finish is None:
            return GenerationChunk(index, events, logprobs, prompt=prompt)
        self._left.discard(index)
        self.completion_tokens += last.completion_tokens
        finish = self._finish(index, last.finish, last.stop)
        return GenerationChunk(index, events, logprobs, finish, last.stop, last.stop_token, prompt)

    def _note_calls(self, index: int, events: list[Event]) -> None:
        for event in events:
            if type(event) is ToolCallStart:
                self._called[index], self._written[index] = True, ""
            elif type(event) is CallArguments:
                self._written[index] += event.text

    def _count_prompt(self, index: int, delta: Delta) -> None:
        """Update the prompt's token counts, which streams may need from their first chunk on."""
        if index % self.ask.n == 0:  # choices of one prompt share it
            tokens, cached = self._prompts[index]
            self._prompts[index] = delta.prompt_tokens, delta.cached_tokens
            self.prompt_tokens += delta.prompt_tokens - tokens
            self.cached_tokens += delta.cached_tokens - cached

    def _events(self, index: int, text: str, last: Delta) -> list[Event]:
        parse = self._parsers[index]
        if parse is None:
            return [Text(text)] if text else []
        events = parse.feed(text) if text else []
        if last.finish is None:
            return events
        return events + parse.end(cut=last.finish == "length" or bool(last.stop))

    def _finish(self, index: int, finish: str, stop: str) -> Finish:
        if finish == "length":
            return "length"
        if stop and self._called[index] and not is_json(self._written[index]):
            return "stop"  # "tool_calls" would tell the client that the call is complete
        # as at OpenAI: a call of a tool that the request named finishes with "stop"
        return "tool_calls" if self._called[index] and not self._choice.once else "stop"


async def open_turn(router: Router, ask: GenerationRequest) -> Generation:
    """Return a `Generation`, after the first load of a model that is loaded on demand."""
    route = router.find(ask.model)
    if route.status.info is None:
        router.access.require_model(route.status.name, base_of(route))
        await router.demand.until_known(route, ask.timeout_s)
    return Generation(router, ask)


def _choose(ask: GenerationRequest, model: ModelStatus) -> ToolChoice:
    """Return the tools that may be called. Raises RequestError if a tool cannot be called."""
    tools, asked = check_tools(ask.tools), ask.tool_choice
    choice = choice_by_word(tools, asked) if isinstance(asked, str) else choose(tools, asked)
    if choice.tools and model.info is not None and "tools" not in model.info.serves:
        forced = "forced_tools" in model.info.serves
        if not (forced and choice.mode == "required"):
            only = '; a tool_choice that asks for a call is served, such as "required"'
            raise Unsupported(
                f"tools: the {model.engine} engine of {model.name!r} does not take it: the chat"
                " template tells the model of no tools, or it is not known how it calls them (then"
                f" `tool_parser` in the file says so){only if forced else ''}",
                param="tools",
            )
    form = ask.params.grammar
    if choice.tools and form is not None and form.kind != "json_schema":
        raise Unsupported(
            f"{form.param}: beside tools the answer can be bound by a JSON schema only; leave out"
            " one of the two",
            param=form.param,
        )
    if choice.mode == "required" and form is not None:
        raise RequestError(
            f"{form.param}: a call of a tool is asked for already; leave out one of the two",
            param=form.param,
        )
    return choice


def _dialect(info: ModelInfo, choice: ToolChoice) -> Dialect:
    """Return the format of the answer.

    A model whose template has no tools is made to write a required call in plain JSON.
    """
    if choice.mode == "required" and "tools" not in info.serves:
        return replace(info.dialect, tools="json", tool_begin="", tool_end="")
    return info.dialect


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Return `params` with the seed of the choice at `index`, wrapped to 64 bits."""
    if not index or params.seed is None:
        return params
    return replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)
