"""How much one request may hold."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from servekit.errors import RequestError
from servekit.gateway.generation.generation import GenerationRequest, open_generation
from servekit.gateway.http.request_limits import (
    check_counts,
    check_depth,
    check_free,
    check_schema,
)
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.protocol.access import RequestLimits
from servekit.protocol.messages import (
    AccessRules,
    ChatMessage,
    Media,
    ModelInfo,
    ModelStatus,
    SamplingParams,
    Topology,
)
from servekit.protocol.residency import ResidencyStatus
from servekit.protocol.types import Grammar
from tests.unit.gateway.conftest import DEADLINE_S, Service

LIMITS = RequestLimits(messages=2, stop_strings=1, json_depth=8, schema_depth=3)


def nested(depth: int) -> Any:
    value: Any = []
    for i in range(depth - 1):
        value = [value] if i % 2 else {"x": value}
    return value


def schema(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for i in range(depth - 1):
        ways: list[dict[str, Any]] = [
            {"items": found},
            {"properties": {"a": found}},
            {"anyOf": [found]},
        ]
        found = ways[i % 3]
    return found


def test_depth() -> None:
    check_depth(nested(8), LIMITS, "tools")
    check_depth("text", LIMITS, "tools")
    with pytest.raises(RequestError, match="tools is nested deeper than the limit of 8") as error:
        check_depth(nested(9), LIMITS, "tools")
    assert error.value.param == "tools"
    with pytest.raises(RequestError):
        check_depth(nested(50_000), LIMITS, "tools")


@pytest.mark.parametrize("multiple", [33_333_333, 10_007, 0.010_007, 1e-300 / 3, 123_456_789_000])
def test_multiples_that_take_long_to_compile(multiple: float) -> None:
    for schema in ({"multipleOf": multiple}, {"properties": {"a": {"multipleOf": multiple}}}):
        with pytest.raises(RequestError, match=r"multipleOf is .*, and at most 10000") as caught:
            check_schema(schema, LIMITS, "tools")
        assert caught.value.param == "tools"


@pytest.mark.parametrize("multiple", [1, 0.01, 5, 1e-9, 10**12, 2_500_000, 9_999, 0, True, "7"])
def test_multiples_that_do_not(multiple: Any) -> None:
    check_schema({"type": "integer", "multipleOf": multiple}, LIMITS, "tools")


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
def test_numbers_beyond_the_wire(number: int) -> None:
    for value in (number, {"a": [number]}, [[[[[[[{"a": number}]]]]]]]):
        with pytest.raises(RequestError, match="tools: a whole number in it is beyond 64 bits"):
            check_depth(value, LIMITS, "tools")
    check_depth([2**64 - 1, -(2**63), True, 1e300], LIMITS, "tools")


def test_schemas() -> None:
    check_schema(schema(3), LIMITS, "response_format")
    check_schema(True, LIMITS, "response_format")
    for depth in (4, 6):
        with pytest.raises(RequestError, match=r"see server\.limits\."):
            check_schema(schema(depth), LIMITS, "response_format")


def test_a_schema_that_is_wide_or_wrong_is_not_deep() -> None:
    wide = {"properties": {str(i): {"items": {}} for i in range(1000)}, "anyOf": 3, "items": [1]}
    check_schema(wide, LIMITS, "response_format")


def test_tools_and_grammars() -> None:
    def tool(parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    def grammar(text: Any) -> Grammar:
        return Grammar("json_schema", msgspec.json.encode(text).decode())

    roomy = RequestLimits(json_depth=32, schema_depth=3)
    check_free([tool(schema(3)), tool(None), {"function": 3}], {}, grammar(True), roomy)
    with pytest.raises(RequestError) as error:
        check_free([tool(schema(4))], {}, None, roomy)
    assert error.value.param == "tools"
    with pytest.raises(RequestError) as error:
        check_free([], {"x": nested(40)}, None, roomy)
    assert error.value.param == "chat_template_kwargs"
    with pytest.raises(RequestError) as error:
        check_free([], {}, grammar(schema(4)), roomy)
    assert error.value.param == "response_format"


async def test_the_router_looks_at_grammars(service: Service) -> None:
    await service.up()
    deep = Grammar("json_schema", msgspec.json.encode(schema(20)).decode())
    with pytest.raises(RequestError, match="limit of 16"):
        service.router.queue_call(InflightRequest("m", SamplingParams(grammar=deep), prompt="x"))


def test_counts() -> None:
    messages = [ChatMessage("user", "x")] * 3
    with pytest.raises(RequestError, match="messages: 3 are over the limit of 2"):
        check_counts(messages, (), LIMITS)
    with pytest.raises(RequestError, match="stop: 2 are over the limit of 1"):
        check_counts(None, ("a", "b"), LIMITS)


async def test_the_router_keeps_them(service: Service) -> None:
    await service.up()
    service.router.access.apply_rules(AccessRules(limits=LIMITS))
    with pytest.raises(RequestError, match=r"see server\.limits\.stop_strings"):
        service.router.queue_call(InflightRequest("m", SamplingParams(stop=("a", "b")), prompt="x"))
    asked = service.router.queue_call(
        InflightRequest("m", SamplingParams(max_tokens=2), prompt="x")
    )
    assert [delta async for delta in asked]


TOOL = {"type": "function", "function": {"name": "f"}}
DEEP = {"type": "function", "function": {"name": "f", "parameters": schema(4)}}
PICTURES = (Media(b"", "image/png"),) * 3
HELLO = ChatMessage("user", "Hi")
OVER: list[tuple[str, dict[str, Any]]] = [
    ("stop_strings", {"params": SamplingParams(stop=("a", "b"))}),
    (
        "stop_strings",
        {"params": SamplingParams(stop=("a", "b")), "tools": [TOOL], "tool_choice": "required"},
    ),
    ("messages", {"messages": [HELLO] * 3}),
    ("images", {"messages": [ChatMessage("user", "Look", media=PICTURES)]}),
    ("schema_depth", {"tools": [DEEP]}),
    ("json_depth", {"template": {"x": nested(17)}}),
]


@pytest.mark.parametrize("known", [True, False], ids=["resident", "never loaded"])
@pytest.mark.parametrize(("key", "fields"), OVER)
async def test_a_request_over_a_limit_is_refused_before_its_model_is_loaded(
    key: str, fields: dict[str, Any], known: bool
) -> None:
    """Also with what the engine is not to hear, such as stop strings of a call that is required."""
    told: list[Any] = []
    router = Router("test", use=told.append)
    info = ModelInfo(64, 4, True, "echo", "none", "cpu", serves=("generate", "tools", "images"))
    away = ResidencyStatus("on_demand", "stopped")
    status = ModelStatus("m", "echo", "x", 0, (), info if known else None, residence=away)
    limits = replace(LIMITS, images=2, json_depth=16)
    router.apply_topology(Topology((status,), access=AccessRules(limits=limits)))
    told.clear()
    asked: dict[str, Any] = {"model": "m", "params": SamplingParams(), "messages": [HELLO]}
    request = GenerationRequest(**asked | fields)
    with pytest.raises(RequestError, match=rf"see server\.limits\.{key}"):
        async with asyncio.timeout(DEADLINE_S):
            await open_generation(router, request)
    assert told == []
