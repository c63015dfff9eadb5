"""API-neutral requests and answers, on which all but the simplest endpoints are built.

A `GenerationRequest` holds the request of any API. A `Generation` answers it with one
`InflightRequest` for each choice, through the same queue as any other request, and with a parser
that separates text, reasoning and tool calls.

    generation = Generation(router, request)  # raises RequestError: nothing has been sent yet
    generation.read_by(writer)                # or: async for chunks in generation
    generation.cancel()                       # or: choices = await generation.whole()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from servekit.errors import ModelNotFound, Unsupported
from servekit.gateway.api.images import list_media
from servekit.gateway.http.request_limits import check_counts, check_free
from servekit.gateway.routing.adapter_route import base_of
from servekit.gateway.routing.preset_route import PresetRoute, complete_chat, complete_params
from servekit.gateway.routing.request import FurtherChoice, InflightRequest, Reader
from servekit.gateway.routing.router import ModelQueue, Router
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
    is_json,
    parse_tool_choice,
    parser,
    tool_grammar,
)
from servekit.gateway.tool_parsing import ToolChoice as ToolChoice
from servekit.protocol.access import RequestLimits
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
_NO_TOOLS = parse_tool_choice([], None)
_NO_DIALECT = Dialect()
_NO_PROMPTS: tuple[None] = (None,)
_NO_FIELDS: dict[str, Any] = {}


class GenerationRequest(msgspec.Struct, kw_only=True):
    """A client's request in API-neutral form. Exactly one of `messages` and `prompts` is set."""

    model: str
    params: SamplingParams
    messages: list[ChatMessage] | None = None
    prompts: list[str | list[int]] = []
    n: int = 1  # choices for each prompt; with a seed, each gets the next one
    tools: Tools = []  # OpenAI's definitions
    #: Any of OpenAI's forms, or one word: "none", "auto", "required", or a tool's name.
    tool_choice: Any = None
    parallel: bool = True  # the model may call several tools at once
    template: dict[str, Any] = {}  # extra variables of the chat template
    template_defaults: dict[str, Any] = {}  # those of the API, for what the client leaves out
    continues: bool = False  # the last message is the beginning of the answer
    reasoning: bool = True  # separate reasoning from text
    stream: bool = True
    follow: bool = False  # also tell each new position in the queue
    session: str = ""  # as named by the client
    key: str = ""
    priority: int = 0
    timeout_s: float | None = None
    began_s: float = 0.0  # when it came, monotonic, if it has waited for something; 0: now
    #: Completes the request before it is opened, as with an earlier conversation.
    complete: Callable[[GenerationRequest], Awaitable[None]] | None = None
    #: Lets the only call go on with an answer of which another gateway has sent a part.
    resume: Callable[[InflightRequest], None] | None = None


class GenerationChunk(msgspec.Struct, gc=False):
    """New events of one choice. `finish` is set on its last chunk."""

    choice: int
    events: list[Event]
    logprobs: list[TokenLogprob] = []
    finish: Finish | None = None
    stop: str = ""  # the stop string that ended the choice, if any
    stop_token: int = -1  # the one of `stop_token_ids` that ended it; -1 if none
    prompt: Prompt | None = None  # with the first chunk, if it was asked for


class Choice(msgspec.Struct):
    """A complete choice, collected from its chunks."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    finish: Finish = "stop"
    stop: str = ""
    stop_token: int = -1
    prompt: Prompt | None = None

    def add(self, chunk: GenerationChunk) -> None:
        for event in chunk.events:
            if type(event) is Text:
                self.text += event.text
            else:
                self._add_event(event)
        self.logprobs += chunk.logprobs
        self.finish = chunk.finish or self.finish
        self.stop = chunk.stop
        self.stop_token = chunk.stop_token
        self.prompt = self.prompt or chunk.prompt

    def _add_event(self, event: Event) -> None:
        match event:
            case Reasoning(text):
                self.reasoning += text
            case ToolCallStart(_, id, name):
                self.calls.append(ToolCall(id, name, ""))
            case CallArguments(index, text):
                call = self.calls[index]
                self.calls[index] = replace(call, arguments=call.arguments + text)


class ChoiceStream(msgspec.Struct, eq=False):
    """A choice under way: its call, and the parser of its text."""

    index: int
    call: InflightRequest
    parser: Parser | None  # None if everything is text
    calls_tool: bool = False
    arguments: str = ""  # of the last tool call

    def parse(self, text: str) -> list[Event]:
        if self.parser is None:
            return [Text(text)]
        events = self.parser.feed(text)
        self._note_calls(events)
        return events

    def end_text(self, *, cut: bool) -> list[Event]:
        """Return the events of the text that the parser has held back."""
        assert self.parser is not None
        events = self.parser.end(cut=cut)
        self._note_calls(events)
        return events

    def _note_calls(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is ToolCallStart:
                self.calls_tool, self.arguments = True, ""
            elif type(event) is CallArguments:
                self.arguments += event.text


class Generation:
    """The answers to one `GenerationRequest`.

    The calls are opened at once: the constructor raises the errors of `Router.queue_call`, and
    Unsupported.
    """

    __slots__ = (
        "_choices",
        "_left",
        "_news",
        "_tool_choice",
        "_whole",
        "completion_tokens",
        "end_of_tick",
        "first",
        "model",
        "only",
        "plain",
        "request",
    )

    def __init__(self, router: Router, request: GenerationRequest) -> None:
        try:
            route = router.find(request.model)
        except ModelNotFound:
            # `queue_call` refuses it in the same words, and counts the refusal
            router.queue_call(
                InflightRequest(request.model, request.params, messages=request.messages)
            )
            raise
        status = route.status
        if request.template_defaults or isinstance(route, PresetRoute):
            request = _complete(route, request)
        self.model = status.name
        self.request = request
        self.end_of_tick = router.end_of_tick
        self.completion_tokens = 0
        self._news: asyncio.Event | None = None
        self._whole: list[Choice] = []  # for an answer that is not streamed
        params = request.params
        dialect = _NO_DIALECT if status.info is None else status.info.dialect
        if _is_plain(request, dialect):
            self._tool_choice = _NO_TOOLS
            choices = self._make_choices(params)
        else:
            _check_limits(request, router.access.rules.limits)
            self._tool_choice = tools = _choose_tools(request, status)
            if status.info is not None:
                dialect = _dialect(status.info, tools)
            begun = begins_thinking(dialect, request.template, request.continues)
            told, more = _tell_engine(request, dialect, tools, begun)
            parse = partial(_parser, request, dialect, tools, begun)
            choices = self._make_choices(told, more, parse)
        self._choices = self._left = choices
        first = choices[0]
        self.first = first.call
        rich = params.logprobs is not None or params.prompt_logprobs is not None or params.echo
        #: The only choice, if it brings nothing but text until it ends.
        self.only = only = first if len(choices) == 1 and not rich else None
        #: Whether that text is the answer as it is, without a parser.
        self.plain = only is not None and only.parser is None
        if not (self.plain or request.stream):
            self._whole = [Choice() for _ in choices]
        try:
            for choice in choices:
                router.queue_call(choice.call, request.timeout_s)
        except BaseException:
            self.cancel()
            raise
        if request.follow:
            router.follow_position(self.first)

    def _make_choices(
        self,
        params: SamplingParams,
        more: dict[str, Any] = _NO_FIELDS,
        make_parser: Callable[[], Parser | None] | None = None,
    ) -> list[ChoiceStream]:
        request = self.request
        choices: list[ChoiceStream] = []
        for prompt in request.prompts or _NO_PROMPTS:
            for index in range(request.n):
                make = FurtherChoice if index else InflightRequest
                call = make(  # by position: names would cost 0.2 µs
                    request.model,
                    _seeded(params, index) if index else params,
                    prompt,
                    request.messages,
                    request.stream,
                    request.key,
                    request.priority,
                    more,
                    request.session,
                )
                if request.resume is not None:
                    request.resume(call)
                if request.began_s:
                    call.created_s = request.began_s
                parser = None if make_parser is None else make_parser()
                choices.append(ChoiceStream(len(choices), call, parser))
        return choices

    # ---- results

    @property
    def count(self) -> int:
        """Return the number of choices."""
        return len(self._choices)

    @property
    def done(self) -> bool:
        """Return whether all choices have been collected to their ends."""
        return not self._left

    @property
    def place(self) -> int | None:
        """Return the number of requests ahead, if that is followed; None once it runs."""
        return None if self.first.done else self.first.place

    def read_by(self, reader: Reader) -> None:
        """Run `reader` whenever there is news."""
        for choice in self._choices:
            if choice.call.done:
                self.end_of_tick.add(reader)
            else:
                choice.call.reader = reader

    def read_news(self) -> None:
        """Wake the iterator."""
        assert self._news is not None
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[GenerationChunk]]:
        """Yield new chunks until all choices have ended; an empty list if only `place` has changed.

        Leaving early cancels the running calls. Raises RequestError if one of the calls fails.
        """
        self._news = asyncio.Event()
        self.read_by(self)
        try:
            while self._left:
                self._news.clear()
                chunks = self.collect()
                if chunks or self.request.follow:
                    yield chunks
                if self._left and not chunks:
                    await self._news.wait()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel all calls, because the client is gone or wants no more."""
        for choice in self._choices:
            choice.call.cancel()

    def collect(self) -> list[GenerationChunk]:
        """Return new chunks without waiting, perhaps none.

        Raises RequestError if one of the calls has failed.
        """
        chunks: list[GenerationChunk] = []
        for choice in self._left:
            call = choice.call
            if call.has_only_text:
                if call.stream and (text := call.take_text()) and (events := choice.parse(text)):
                    chunks.append(GenerationChunk(choice.index, events))
            elif (delta := call.collect()) is not None:
                chunks.append(self._read_delta(choice, delta))
        return chunks

    def collect_whole(self) -> list[Choice] | None:
        """Return all choices of an answer that is not streamed; None before it is complete.

        Raises RequestError if one of the calls has failed.
        """
        if self.plain:  # nearly all
            if (delta := self.first.collect()) is None:
                return None
            self._left, self.completion_tokens = [], delta.completion_tokens
            finish: Finish = "length" if delta.finish == "length" else "stop"
            return [Choice(delta.text, finish=finish, stop=delta.stop, stop_token=delta.stop_token)]
        for chunk in self.collect():
            self._whole[chunk.choice].add(chunk)
        return None if self._left else self._whole

    def _read_delta(self, choice: ChoiceStream, delta: Delta) -> GenerationChunk:
        text, finish, stop = delta.text, delta.finish, delta.stop
        events = choice.parse(text) if text else []
        if finish is None:
            return GenerationChunk(choice.index, events, delta.logprobs, prompt=delta.prompt)
        self._left = [other for other in self._left if other is not choice]
        self.completion_tokens += delta.completion_tokens
        if choice.parser is not None:
            events = events + choice.end_text(cut=finish == "length" or bool(stop))
        return GenerationChunk(
            choice.index, events, delta.logprobs, self._finish(choice, finish, stop),
            stop, delta.stop_token, delta.prompt,
        )  # fmt: skip

    def _finish(self, choice: ChoiceStream, finish: str, stop: str) -> Finish:
        if finish == "length":
            return "length"
        if stop and choice.calls_tool and not is_json(choice.arguments):
            return "stop"  # "tool_calls" would tell the client that the call is complete
        # as at OpenAI: a call of a tool that the request named finishes with "stop"
        return "tool_calls" if choice.calls_tool and not self._tool_choice.once else "stop"

    # ---- token counts; the choices of one prompt share it

    @property
    def emitted_tokens(self) -> int:
        """The tokens of all answers so far."""
        return sum([len(choice.call.emitted) for choice in self._choices])

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts, those from the prefix cache included."""
        return sum([choice.call.prompt_tokens for choice in self._choices[:: self.request.n]])

    @property
    def cached_tokens(self) -> int:
        """Return the tokens of all prompts that came from the engine's prefix cache."""
        return sum([choice.call.cached_tokens for choice in self._choices[:: self.request.n]])


async def open_generation(router: Router, request: GenerationRequest) -> Generation:
    """Return a `Generation`, after the first load of a model that is loaded on demand."""
    route = router.find(request.model)
    if route.status.info is None:
        router.access.require_model(route.status.name, base_of(route))
        _check_limits(request, router.access.rules.limits)
        router.check_media(route, list_media(request.messages or ()))
        await router.demand.until_known(route, request.timeout_s)
    return Generation(router, request)


def _check_limits(request: GenerationRequest, limits: RequestLimits) -> None:
    """Raise RequestError for a request over `server.limits`, with all that its client has sent.

    The router sees only what its calls keep of it.
    """
    check_counts(request.messages, request.params.stop, limits)
    check_free(request.tools, request.template, request.params.grammar, limits)


def _complete(route: ModelQueue, request: GenerationRequest) -> GenerationRequest:
    """Return a request for `route` with all that its preset or its API sets."""
    params, messages = complete_params(route, request.params), request.messages
    if messages is None:
        return replace(request, params=params)
    messages, template = complete_chat(route, messages, request.template, request.template_defaults)
    return replace(request, params=params, messages=messages, template=template)


def _is_plain(request: GenerationRequest, dialect: Dialect) -> bool:
    """Return whether the answer is only text, which needs no grammar and no parser."""
    if request.tools or request.params.grammar is not None or request.template:
        return False
    if request.continues or request.tool_choice not in (None, "auto", "none"):
        return False
    marked = dialect.think_end or dialect.tools in ("harmony", FRAMED)
    return request.messages is None or not marked


def _choose_tools(request: GenerationRequest, model: ModelStatus) -> ToolChoice:
    """Return the tools that may be called. Raises RequestError if a tool cannot be called."""
    asked = request.tool_choice
    if not request.tools and asked in (None, "auto", "none"):
        return _NO_TOOLS
    tools = check_tools(request.tools)
    choice = (
        choice_by_word(tools, asked) if isinstance(asked, str) else parse_tool_choice(tools, asked)
    )
    if choice.tools and model.info is not None and "tools" not in model.info.serves:
        forced = "forced_tools" in model.info.serves
        if not (forced and choice.mode == "required"):
            only = '; a tool_choice that requires a call is served, such as "required"'
            raise Unsupported(
                f"tools: the {model.engine} engine of {model.name!r} does not take it: its chat"
                " template has no tools, or the format of its calls is unknown (then set"
                f" `tool_parser` in the file){only if forced else ''}",
                param="tools",
            )
    form = request.params.grammar
    if choice.tools and form is not None and form.kind != "json_schema":
        raise Unsupported(
            f"{form.param}: beside tools the answer can be bound by a JSON schema only; leave out"
            " one of the two",
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
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)


def _parser(
    request: GenerationRequest, dialect: Dialect, choice: ToolChoice, begun: bool
) -> Parser | None:
    """Return a parser for one choice; None if everything is text."""
    reasoning = request.reasoning and request.messages is not None
    if dialect.tools == FRAMED and request.messages is not None:
        return parser(dialect, tools=choice.tools, reasoning=reasoning)
    if not choice.tools and not (reasoning and (dialect.think_end or dialect.tools == "harmony")):
        return None
    return parser(dialect, tools=choice.tools, reasoning=reasoning, thinking=begun)


def _tell_engine(
    request: GenerationRequest, dialect: Dialect, choice: ToolChoice, begun: bool
) -> tuple[SamplingParams, dict[str, Any]]:
    """Return the sampling parameters of a call, and its further fields of `Generate`."""
    more: dict[str, Any] = {}
    if choice.tools:
        more["tools"] = list(choice.tools)
        if dialect.tools == FRAMED:
            more["must_call"] = choice.mode == "required"
            more["one_call"] = choice.once or not request.parallel
    if request.template:
        more["template"] = request.template
    if request.continues:
        more["continues"] = True
    params = request.params
    grammar = _grammar(request, dialect, choice, begun)
    if grammar is not params.grammar:
        params = replace(params, grammar=grammar)
    if choice.mode == "required":
        params = replace(params, stop=())  # a stop string must not cut the required call
    return params, more


def _grammar(
    request: GenerationRequest, dialect: Dialect, choice: ToolChoice, begun: bool
) -> Grammar | None:
    """Return the grammar of all the model's text: reasoning, then tool calls or an answer.

    A required call leaves no answer that the client's own could bind.
    """
    grammar = None if choice.mode == "required" else request.params.grammar
    if dialect.tools == FRAMED or not (choice.tools or grammar):
        return grammar  # a framing engine handles tools and reasoning itself
    calls = tool_grammar(dialect, choice, parallel=request.parallel, begun=begun, answer=grammar)
    if calls is not None:
        return calls
    if grammar is not None and request.messages is not None:
        return after_thoughts(dialect, grammar, begun)
    return grammar
