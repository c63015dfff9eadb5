"""Chat conversations rendered to text by the model's own chat template.

Templates agree on `messages`, `tools` and `add_generation_prompt`, and on little else. How a
template expects tool calls (arguments as an object or as text, content empty or missing, ids of
nine characters) is found out by trying.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from msgspec.structs import replace

from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Media, ToolCall

#: Template arguments that callers may set although the library has a parameter of that name.
_OPEN = {"documents"}
#: Names that the library gives to templates, or that Python reserves.
_TAKEN = {"messages", "raise_exception", "strftime_now", "self", "loop"}
#: Longest part of a template's error message that is quoted.
_MAX_WORDS = 300
#: Most checks of attributes that are remembered: a request may name some.
_MOST_CHECKS = 1000
#: How the templates of LFM2 begin a list of tools: they render no calls and name no markers.
LFM_MARKS = ("<|tool_list_start|>", "List of tools: [")
#: In the templates of Kimi, which render the ids of calls, and no names beside them.
_KIMI_SECTION = "<|tool_calls_section_begin|>"
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
#: Text around the tool definitions if the template has no place for them.
_TOOLS = "You can call these functions, each given as JSON:"
_HOW_TO_CALL = (
    'To call a function, answer with {"name": its name, "arguments": {its arguments by name}} and'
    " nothing else."
)
#: A name that occurs in no template, to see where it is rendered.
SENTINEL = "sentinel_tool"
SENTINEL_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": SENTINEL,
        "description": "Does nothing.",
        "parameters": {
            "type": "object",
            "properties": {"sentinel_key": {"type": "string", "description": "Anything."}},
            "required": ["sentinel_key"],
        },
    },
}
SENTINEL_TURNS = (
    ChatMessage("user", "sentinel_question"),
    ChatMessage(
        "assistant", "", tool_calls=(ToolCall("abcdef123", SENTINEL, '{"sentinel_key": "value"}'),)
    ),
)

#: Of the conversations that prove a shorter way to render.
_PROBED_ROLES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant"),
)


class _Form(NamedTuple):
    """The form in which a template expects the assistant's tool calls."""

    arguments_as_text: bool = False
    content: str | None = ""  # of a message that has only calls


_FORMS = [_Form(text, content) for text in (False, True) for content in ("", None)]


class _Calls:
    """The calls of a conversation so far, with the ids that a template wants."""

    def __init__(self, short: bool, named: bool) -> None:
        self._short = short
        self._named = named
        self._count = 0
        self._known: dict[str, tuple[str, str]] = {}  # id for the template and name, by id

    def add(self, call: ToolCall) -> str:
        """Record a call, and return its id for the template."""
        id = f"functions.{call.name}:{self._count}" if self._named else self._shorten(call.id)
        self._count += 1
        self._known[call.id] = id, call.name
        return id

    def find(self, id: str) -> tuple[str, str | None]:
        """Return the id for the template and the name of the call that a result belongs to."""
        return self._known.get(id) or (self._shorten(id), None)

    def _shorten(self, id: str) -> str:
        """Shorten an id for Mistral's templates, which accept only nine letters and digits."""
        if not self._short or _MISTRAL_ID.fullmatch(id):
            return id
        return hashlib.sha256(id.encode()).hexdigest()[:9]


class ChatTemplate:
    """The chat template of a `transformers` tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = inspect.signature(tokenizer.apply_chat_template).parameters
        self._taken = (
            _TAKEN | set(known) | set(getattr(tokenizer, "special_tokens_map", ()))
        ) - _OPEN

    @cached_property
    def source(self) -> str:
        """The template's text; all of them if there are several."""
        found = getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(map(str, found.values())) if isinstance(found, dict) else str(found)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> str:
        """Render a conversation up to where the model continues.

        With `continues` the last message is the beginning of the model's answer; otherwise the
        generation prompt comes last. Raises RequestError if the template refuses, or if `template`
        has a reserved name.
        """
        if not (tools or template or continues):
            text = self._render_plain_turns(messages)
            if text is not None:
                return text
        self._check_request(messages, template or {}, continues)
        messages, tools = self._in_words(messages, tools)
        if continues and not messages[-1].content:
            messages, continues = messages[:-1], False
        try:
            return self._render_turns(messages, tools, template or {}, continues)
        except Exception as error:  # the template is the model's code, and may raise anything
            ordered = _order_roles(messages, takes_system=self._takes_system)
            if ordered != [*messages]:
                with suppress(Exception):
                    return self._render_turns(ordered, tools, template or {}, continues)
            raise RequestError(
                f"The model's chat template refuses these messages: {_first_words(error)}",
                param="messages",
            ) from error

    def _render_turns(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        continues: bool,
    ) -> str:
        dicts = self._as_dicts(messages)
        filled_in = [_filled_in(tool) for tool in tools]
        for told in (tools, filled_in):
            with suppress(Exception):
                return self._apply_template(dicts, told, template, continues)
        return self._apply_template(dicts, _without_null_types(filled_in), template, continues)

    def _check_request(
        self, messages: Sequence[ChatMessage], template: Mapping[str, Any], continues: bool
    ) -> None:
        if not messages:
            raise RequestError("messages must have at least one message.", param="messages")
        if continues and (messages[-1].role != "assistant" or messages[-1].tool_calls):
            raise RequestError(
                "Only a message of the assistant can be continued, and the last message is not"
                " one.",
                param="messages",
            )
        if taken := sorted(self._taken & set(template)):
            raise RequestError(
                f"chat_template_kwargs must not have {', '.join(taken)}: the server sets that.",
                param="chat_template_kwargs",
            )

    def _apply_template(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        continues: bool,
        prompt: bool = True,
    ) -> str:
        if tools and "xml_tools" in self.source:  # SmolLM3's name for them
            template = {"xml_tools": list(tools), **template}
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompt and not continues,
                continue_final_message=continues,
                **template,
            )
        )

    def _render_plain_turns(self, messages: Sequence[ChatMessage]) -> str | None:
        """Return the text of turns that are a role and a text each; None for others."""
        if self._render_plain is None or not messages:
            return None
        turns = []
        for one in messages:
            if one.tool_calls or one.media or one.reasoning is not None:
                return None
            if one.name is not None or one.tool_call_id is not None:
                return None
            turns.append({"role": one.role, "content": one.content})
        with suppress(Exception):  # the library's way says what the template refuses
            return self._render_plain(turns)
        return None

    @cached_property
    def _render_plain(self) -> Callable[[list[dict[str, Any]]], str] | None:
        """A way to render plain turns in a third of the library's time, which copies all that a
        template sees; None if its texts are not the library's.
        """
        if not self._takes_text:
            return None
        library = sys.modules.get("transformers.utils.chat_template_utils")
        try:
            source = self._tokenizer.get_chat_template()
            environment = library._compile_jinja_template(source).environment  # type: ignore[union-attr]
            compiled = _remember_checks(environment).from_string(source)
            make_context = compiled.environment.context_class
            fixed = {**compiled.globals, "tools": None, "documents": None}
            # transformers 5.23 began to copy what a template sees
            copied = getattr(library, "_plain_template_data", dict)
            fixed |= copied(self._tokenizer.special_tokens_map)
        except Exception:  # there is no template, or it is another library's, or a later version
            return None

        def render(messages: list[dict[str, Any]]) -> str:
            # As `compiled.render`, which joins the globals anew each time.
            told = {**fixed, "messages": messages, "add_generation_prompt": True}
            context = make_context(compiled.environment, told, compiled.name, compiled.blocks)
            return "".join(compiled.root_render_func(context))

        def render_by_library(messages: list[dict[str, Any]]) -> str:
            return self._apply_template(messages, (), {}, continues=False)

        for roles in _PROBED_ROLES:
            turns = [{"role": role, "content": f"{SENTINEL} {role}"} for role in roles]
            if _outcome(render, turns) != _outcome(render_by_library, turns):
                return None
        return render

    # ---------------------------------------------------------------- tools in words

    @cached_property
    def takes_tools(self) -> bool:
        """True if the template renders tool definitions."""
        return SENTINEL in self._try_render(SENTINEL_TURNS[:1], [SENTINEL_TOOL])

    @cached_property
    def _takes_calls(self) -> bool:
        """True if the template renders the model's earlier tool calls.

        Some render definitions, and leave the calls out.
        """
        text = self._try_render(SENTINEL_TURNS, [SENTINEL_TOOL])
        return SENTINEL in text.rpartition(SENTINEL_TURNS[0].content)[2]

    @cached_property
    def _takes_results(self) -> bool:
        """True if the template renders results of tools, and definitions."""
        answer, result = ChatMessage("assistant", "sentinel"), ChatMessage("tool", SENTINEL)
        told = [SENTINEL_TURNS[0], answer, replace(result, tool_call_id="abcdef123")]
        return self.takes_tools and SENTINEL in self._try_render(told)

    @cached_property
    def _takes_system(self) -> bool:
        return SENTINEL in self._try_render([ChatMessage("system", SENTINEL), SENTINEL_TURNS[0]])

    def _try_render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render a sentinel conversation; "" if the template refuses."""
        try:
            return self.render_turns(messages, tools)
        except Exception:  # the template is the model's code, and may raise anything
            return ""

    def _in_words(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[ChatMessage], Sequence[Mapping[str, Any]]]:
        """Replace tools, calls and results by plain text if the template has no place for them."""
        if any(message.tool_calls or message.role == "tool" for message in messages):
            messages = _order_results(messages)
            if not self._takes_calls:
                messages = _calls_in_words(messages, self.source if self.takes_tools else "")
                messages = messages if self._takes_results else _results_in_words(messages)
        if tools and not self.takes_tools:
            messages, tools = self._tell_system(messages, _describe_tools(tools)), ()
        return messages, tools

    def _tell_system(self, messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
        """Append `text` to the system message, or add one.

        If the template takes no system message, `text` is prepended to the first message.
        """
        first, *others = messages
        if self._takes_system and first.role != "system":
            return [ChatMessage("system", text), first, *others]
        told = ChatMessage(first.role, text)
        joined = _join_turns(first, told) if first.role == "system" else _join_turns(told, first)
        return [replace(first, content=joined.content, media=joined.media), *others]

    def render_turns(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render a finished conversation, without generation prompt.

        Raises any error of the template.
        """
        return self._apply_template(
            self._as_dicts(messages), tools, {}, continues=False, prompt=False
        )

    # ---------------------------------------------------------------- messages

    def _as_dicts(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        form = self._form if any(message.tool_calls for message in messages) else _Form()
        calls = _Calls(self._wants_short_ids, _KIMI_SECTION in self.source)
        return [self._as_dict(message, form, calls) for message in messages]

    def _as_dict(self, message: ChatMessage, form: _Form, calls: _Calls) -> dict[str, Any]:
        content = self._content_of(message)
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            fields["content"] = content or form.content
            fields["tool_calls"] = [
                _call_dict(call, calls.add(call), form) for call in message.tool_calls
            ]
        name = message.name
        if message.tool_call_id is not None:
            fields["tool_call_id"], called = calls.find(message.tool_call_id)
            name = name or called
        if name is not None:
            fields["name"] = name
        if message.reasoning is not None:
            fields["reasoning_content"] = message.reasoning
        return fields

    def _content_of(self, message: ChatMessage) -> str | list[dict[str, str]]:
        if not message.media and (not message.content or self._takes_text):
            return message.content
        return [_part_dict(part) for part in message.parts]

    @cached_property
    def _takes_text(self) -> bool:
        """False if the template renders content only if it comes in parts, as some with images."""
        part = _part_dict(SENTINEL)
        return self._renders(SENTINEL) or not self._renders([part])

    def _renders(self, content: str | list[dict[str, str]]) -> bool:
        try:
            turn = {"role": "user", "content": content}
            return SENTINEL in self._apply_template([turn], (), {}, continues=False)
        except Exception:  # the template is the model's code, and may raise anything
            return False

    @cached_property
    def _wants_short_ids(self) -> bool:
        return re.search(r"length\s*!=\s*9", self.source) is not None

    @cached_property
    def _form(self) -> _Form:
        """The first form in which a sentinel's arguments are rendered correctly."""
        for form in _FORMS:
            calls = _Calls(self._wants_short_ids, _KIMI_SECTION in self.source)
            dicts = [self._as_dict(turn, form, calls) for turn in SENTINEL_TURNS]
            try:
                text = self._apply_template(
                    dicts, [SENTINEL_TOOL], {}, continues=False, prompt=False
                )
            except Exception:  # the template does not accept this form
                continue
            turn = text.rpartition("sentinel_question")[2]
            if SENTINEL in turn and '\\"' not in turn:  # not quoted twice
                return form
        return _Form()


def _call_dict(call: ToolCall, id: str, form: _Form) -> dict[str, Any]:
    arguments = call.arguments if form.arguments_as_text else _as_object(call.arguments)
    return {
        "id": id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _remember_checks(environment: Any) -> Any:
    """Return a sandboxed jinja2 environment that remembers which attributes are safe to read.

    jinja2 decides that at each access, which takes up to half of a template's time, by the type of
    the object and the name of the attribute.
    """
    remembering = environment.overlay()
    decide, known = remembering.is_safe_attribute, dict[tuple[type, str], bool]()

    def is_safe_attribute(obj: Any, attr: str, value: Any) -> bool:
        safe = known.get((type(obj), attr))
        if safe is None:
            safe = decide(obj, attr, value)
            if len(known) < _MOST_CHECKS:
                known[type(obj), attr] = safe
        return safe

    remembering.is_safe_attribute = is_safe_attribute
    return remembering


def _outcome(render: Callable[..., str], turns: list[dict[str, Any]]) -> str:
    """Return the text of a template, or the error that it raises."""
    try:
        return render(turns)
    except Exception as error:  # the template is the model's code, and may raise anything
        return repr(error)


def _describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    named = [{"name": "", **_filled_in(tool)["function"]} for tool in tools]  # puts the name first
    functions = [json.dumps(function, ensure_ascii=False) for function in named]
    return "\n".join([_TOOLS, *functions, "", _HOW_TO_CALL])


def _part_dict(part: str | Media) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "audio" if part.modality == "audio" else "image"}


def _put_before(text: str, message: ChatMessage) -> ChatMessage:
    """Put a text before a message's content; its media keep their places."""
    media = tuple(replace(one, at=one.at + len(text)) for one in message.media)
    return replace(message, content=text + message.content, media=media)


def _join_turns(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """Append the content of the second message to the first."""
    parted = (first.content or first.media) and (second.content or second.media)
    moved = _put_before(first.content + ("\n\n" if parted else ""), second)
    return replace(first, content=moved.content, media=(*first.media, *moved.media))


def _calls_in_words(messages: Sequence[ChatMessage], source: str) -> list[ChatMessage]:
    """Replace tool calls by text, and name their results.

    The text is what the model writes, as far as the template's source tells; otherwise JSON.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    told: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            name = message.name or names.get(message.tool_call_id or "")
            message = replace(message, name=name)
        elif message.tool_calls:
            lines = [message.content] if message.content else []
            lines.append(_write_calls(message.tool_calls, source))
            message = replace(message, content="\n".join(lines), tool_calls=())
        told.append(message)
    return told


def _write_calls(calls: Sequence[ToolCall], source: str) -> str:
    arguments = [_as_object(call.arguments) for call in calls]
    if any(mark in source for mark in LFM_MARKS):
        texts = []
        for call, given in zip(calls, arguments, strict=True):
            given = given if isinstance(given, dict) else {}
            parts = [f"{key}={_as_python(value)}" for key, value in given.items()]
            texts.append(f"{call.name}({', '.join(parts)})")
        return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"
    objects = [
        json.dumps({"name": call.name, "arguments": given}, ensure_ascii=False)
        for call, given in zip(calls, arguments, strict=True)
    ]
    if "<|tool_call|>" in source:
        return f"<|tool_call|>[{', '.join(objects)}]"
    if "<tool_call>" in source:
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return "\n".join(objects)


def _as_python(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _results_in_words(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Replace results by messages of the user.

    Results and a user message after them become one message, because templates want alternating
    turns.
    """
    told: list[ChatMessage] = []
    results = False  # whether the last message of `told` consists of results
    for message in messages:
        joins = results and message.role in ("tool", "user")
        results = message.role == "tool"
        if results:
            turn = ChatMessage("user", message.content, media=message.media)
            message = _put_before(f"Result of {message.name or 'the function'}: ", turn)
        if joins:
            told[-1] = _join_turns(told[-1], message)
        else:
            told.append(message)
    return told


def _order_results(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with results that follow each other in the order of their calls.

    Agents send those first that were done first, and many templates show no ids.
    """
    ordered: list[ChatMessage] = []
    order: dict[str, int] = {}
    for is_result, row in groupby(messages, lambda one: one.role == "tool"):
        turns = list(row)
        if is_result:
            places = [order.get(one.tool_call_id or "", len(order)) for one in turns]
            turns = [turns[at] for at in sorted(range(len(turns)), key=places.__getitem__)]
        elif calls := turns[-1].tool_calls:
            order = {call.id: at for at, call in enumerate(calls)}
        ordered += turns
    return ordered


def _order_roles(messages: Sequence[ChatMessage], *, takes_system: bool) -> list[ChatMessage]:
    """Return the conversation as strict templates want it: one system message, at the beginning if
    at all, and no two messages of the user in a row.

    Agents write system messages wherever they are; those that cannot stay are the user's.
    """
    ordered: list[ChatMessage] = []
    for message in messages:
        last = ordered[-1].role if ordered else "system"
        if message.role == "system" and not (takes_system and last == "system"):
            message = replace(message, role="user")
        if ordered and message.role == last in ("system", "user"):
            ordered[-1] = _join_turns(ordered[-1], message)
        else:
            ordered.append(message)
    return ordered


def _filled_in(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool definition with all fields: some templates need those optional for OpenAI."""
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    stated = {key: value for key, value in tool["function"].items() if value is not None}
    return {**tool, "function": empty | stated}


def _without_null_types(value: Any) -> Any:
    """Return a tool, or a part of one, whose schema does not say which values may be null.

    The templates of Hermes recurse for ever at such a type.
    """
    if isinstance(value, list):
        return [_without_null_types(one) for one in value if one != {"type": "null"}]
    if not isinstance(value, dict):
        return value
    told = {key: _without_null_types(one) for key, one in value.items()}
    if isinstance(kinds := told.get("type"), list) and "null" in kinds:
        others = [kind for kind in kinds if kind != "null"]
        told["type"] = others[0] if len(others) == 1 else others
    return told


def _as_object(arguments: str) -> Any:
    """Return arguments as an object for the template; as text if they are not a JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _first_words(error: Exception) -> str:
    """Return the first line of an error of the template or library, without the conversation."""
    text = str(error) or type(error).__name__
    return text.partition("Final message to continue")[0].strip().split("\n")[0][:_MAX_WORDS]
