"""Parameters that no schema declares: told, refused, or passed over, as the file says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ollama import Options as OllamaOptions

from servekit.errors import RequestError
from servekit.gateway.api import unknown_parameters
from servekit.gateway.api.anthropic.request import MessagesRequest
from servekit.gateway.api.anthropic.tools import Tool, choose_own_tools
from servekit.gateway.api.ollama.request import ChatRequest as OllamaChat
from servekit.gateway.api.openai.responses_schema import ResponsesRequest, ask_of
from servekit.gateway.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    decode,
)
from servekit.gateway.api.unknown_parameters import UNKNOWN
from servekit.gateway.auth.authorization import Access
from servekit.gateway.http.request_context import ORIGIN, RequestContext
from servekit.protocol.access import AccessRules

BODY: dict[str, Any] = {"prompt": "a", "model": "m"}


@pytest.fixture
def origin() -> Iterator[RequestContext]:
    made = RequestContext({})
    before = ORIGIN.set(made)
    yield made
    ORIGIN.reset(before)
    UNKNOWN.policy = "warn"


def read(**more: Any) -> CompletionRequest:
    return decode(CompletionRequest, json.dumps(BODY | more).encode())


def test_the_answer_is_to_name_them(origin: RequestContext) -> None:
    assert read(temperature=0.5, foo=1, bar={"a": [1]}).temperature == 0.5
    assert origin.warning == b"unknown parameters: bar, foo"
    assert dict(origin.headers)[b"servekit-warning"] == origin.warning


def test_what_is_known_needs_no_word(origin: RequestContext) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    read(**harmless, logprobs=1)
    decode(ChatRequest, b'{"messages": [{"role": "user", "content": "a", "odd": 1}]}')
    assert origin.warning == b"" and origin.headers == [origin.header]


TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
NEEDED = {ResponsesRequest: {"input": "a"}, MessagesRequest: TALK | {"max_tokens": 1}}
NESTED: list[tuple[Any, dict[str, Any], str]] = [
    (ChatRequest, {"stream_options": {"include_usage": True, "frob": 1}}, "stream_options.frob"),
    (ChatRequest, {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    (
        ChatRequest,
        {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}, "x": 1}},
        "response_format.json_schema.shema, response_format.x",
    ),
    (OllamaChat, {"options": {"num_ctx": 10, "frob": 1}}, "options.frob"),
    (MessagesRequest, {"thinking": {"type": "disabled", "frob": 1}}, "thinking.frob"),
    (
        MessagesRequest,
        {"output_config": {"format": {"schema": {}, "frob": {"a": 1}}}},
        "output_config.format.frob",
    ),
    (ResponsesRequest, {"text": {"frob": 1}}, "text.frob"),
    (ResponsesRequest, {"text": {"format": {"schma": {}}}}, "text.format.schma"),
    (ResponsesRequest, {"reasoning": {"efort": "low"}}, "reasoning.efort"),
]


@pytest.mark.parametrize(("kind", "more", "unknown"), NESTED, ids=[row[2] for row in NESTED])
def test_options_are_checked_as_the_body_is(
    origin: RequestContext, kind: Any, more: dict[str, Any], unknown: str
) -> None:
    body = json.dumps(NEEDED.get(kind, TALK) | more).encode()
    decode(kind, body)
    assert origin.warning.decode().partition(": ")[2] == unknown
    UNKNOWN.policy = "refuse"
    with pytest.raises(RequestError, match=f"unknown parameters?: {unknown};") as error:
        decode(kind, body)
    assert error.value.param == unknown.partition(",")[0]


def test_known_options_and_anything_in_a_list_need_no_word(origin: RequestContext) -> None:
    UNKNOWN.policy = "refuse"
    options: dict[str, Any] = {
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"x-own": 1}}},
        "structured_outputs": None,
        "tools": [{"type": "function", "function": {"name": "f"}, "frob": 1}],
    }
    message = {"role": "assistant", "content": [{"type": "text", "text": "a", "frob": 1}], "x": 1}
    request = {"messages": [message], **options}
    decoded = decode(ChatRequest, json.dumps(request).encode())
    assert isinstance(decoded.stream_options, StreamOptions) and not origin.warning
    every = dict.fromkeys(OllamaOptions.model_fields)
    body = {"messages": [{"role": "user", "content": "a", "x": 1}], "options": every}
    decode(OllamaChat, json.dumps(body).encode())


def test_options_that_come_twice_are_the_last(origin: RequestContext) -> None:
    UNKNOWN.policy = "refuse"
    body = b'{"prompt": "a", "stream_options": {"frob": 1}, "stream_options": null}'
    assert decode(CompletionRequest, body).stream_options is None


def test_what_is_wrong_in_options_is_told_with_its_place(origin: RequestContext) -> None:
    with pytest.raises(RequestError, match=r"stream_options\.include_usage: expected") as error:
        read(stream_options={"frob": 1, "include_usage": 3})
    assert error.value.param == "stream_options.include_usage"


def test_a_hostile_name_harms_no_header(origin: RequestContext) -> None:
    read(**{"a\r\nset-cookie: x=1": 1, "é" * 1000: 2, **{f"p{at:03}": at for at in range(100)}})
    assert b"\r" not in origin.warning and b"\n" not in origin.warning
    assert (
        len(origin.warning)
        < unknown_parameters.MOST_NAMES * (unknown_parameters.MOST_CHARS + 2) + 60
    )
    assert origin.warning.isascii() and b"and 94 more" in origin.warning


def test_what_is_wrong_besides_is_told_first(origin: RequestContext) -> None:
    with pytest.raises(RequestError, match="temperature"):
        read(foo=1, temperature="hot")
    with pytest.raises(RequestError, match="prompt is required"):
        decode(CompletionRequest, b'{"foo": 1}')


def test_the_file_can_have_them_refused_or_passed_over(origin: RequestContext) -> None:
    Access().apply_rules(AccessRules(unknown_parameters="refuse"))
    with pytest.raises(RequestError, match="unknown parameter: foo;") as error:
        read(foo=1)
    assert error.value.param == "foo"
    Access().apply_rules(AccessRules(unknown_parameters="ignore", log_prompts=True))
    assert read(foo=1).model == "m"
    assert origin.warning == b""


def test_the_log_names_each_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[list[str]] = []

    class Log:
        def warning(self, _: str, names: list[str]) -> None:
            lines.append(names)

    monkeypatch.setattr(unknown_parameters, "log", Log())
    meet = unknown_parameters.UnknownParameters().check_body
    for _ in range(3):
        meet(b'{"foo": 1}', CompletionRequest)
    assert lines == [["foo"]]
    for at in range(5000):
        meet(b'{"made-up-%d": 1}' % at, CompletionRequest)
    assert len(lines) <= unknown_parameters.MOST_REMEMBERED + 2


def test_tools_of_openais_own_are_left_out_beside_functions(origin: RequestContext) -> None:
    """As agents offer all that they know."""
    function = {"type": "function", "name": "f"}
    others = [{"type": "namespace", "name": "n", "tools": []}, {"type": "web_search"}]
    body = json.dumps({"input": "a", "tools": [others[0], function, others[1]], "odd": 1}).encode()
    request = decode(ResponsesRequest, body)
    asked = ask_of(request, "")
    assert [tool["function"]["name"] for tool in asked.tools] == ["f"]
    assert request.tools is not None and len(request.tools) == 1, "the response tells of these"
    assert origin.warning == (
        b"unknown parameter: odd; left out: tools.namespace, tools.web_search"
    )
    UNKNOWN.policy = "refuse"
    with pytest.raises(RequestError) as refused:
        ask_of(decode(ResponsesRequest, body.replace(b', "odd": 1', b"")), "")
    assert refused.value.param == "tools[0].type"


def test_tools_of_anthropics_own_are_left_out_beside_others(origin: RequestContext) -> None:
    own = Tool("f", None, {"type": "object"})
    search, shell = Tool("s", type="web_search_20250305"), Tool("b", type="bash_20250124")
    assert choose_own_tools([search, own, shell]) == [own]
    assert origin.warning == b"left out: tools.bash_20250124, tools.web_search_20250305"
    assert choose_own_tools([search]) == [search], "it is refused, for the request is for it"
    assert choose_own_tools(None) == []
    UNKNOWN.policy = "refuse"
    assert choose_own_tools([search, own]) == [search, own]
