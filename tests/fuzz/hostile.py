"""Values that have broken servers: each as the very bytes that stand in the JSON, valid or not."""

from __future__ import annotations

import json
import random
from typing import Any

DEEP = 5000


class Raw(bytes):
    """Bytes that go into a body as they are."""


def nested(depth: int) -> Raw:
    return Raw(b"[" * depth + b"]" * depth)


def nested_objects(depth: int) -> Raw:
    return Raw(b'{"a":' * depth + b"1" + b"}" * depth)


SMALL: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, "", " ", "a", "null", "true", "1", "\0"),
    *([], {}, [[]], [None], [{}], {"": ""}, [1, "a"], ["a", 1, None, {}], {"type": "text"}),
    *map(Raw, (b"-0.0", b"-0", b"1e999", b"-1e999", b"1e308", b"1e-400", b"NaN", b"Infinity")),
    *map(Raw, (b"-Infinity", b"01", b"1.", b".5", b"0x10", b"1e", b"+1", b"nul", b"'a'", b"")),
    *map(Raw, (b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b'"\\x"', b'"a', b"[1,]", b"{,}")),
    *map(Raw, (b'"\xff\xfe"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\n"')),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)),
    *(-(2**63) - 1, 10**30, 10**400, -(10**400), 1e300, 1e-300, 1.0, 3.0, 4096.0),
    *("😀" * 3, "é" * 20, "\u2028", "\ufeff", "\u202e", "﷽", "{{ 7*7 }}", "{% for %}", "%s%n"),
    *("../../etc/passwd", "file:///etc/passwd", "<script>", "data:image/png;base64,AAAA"),
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": {',
        "<|im_end|>",
    ),
    *('<think>a</think><tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "\r\n\r\ndata: x"),
    *("required", "auto", "none", "text", "json_object", "json_schema", "user", "tool", "base64"),
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    [{"type": "image_url", "image_url": {"url": "https://example.invalid/a.png"}}],
    [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}],
    [{"type": "text", "text": "a"}, {"type": "text"}],
)

LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
TREE = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}

SCHEMAS: tuple[Any, ...] = (
    *({"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "https://example.invalid/s.json"}, LOOP, TREE),
    *({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"type": "nonsense"}, {"type": 5}),
    *({"type": "string", "pattern": text} for text in ("(a+)+$", "(a|a)*b", "[", "(?=a)b", "\\1")),
    *({"type": "string", "pattern": text} for text in ("a{100000}", "((a{99}){99}){99}", "(?<=x)")),
    {"type": "string", "pattern": "(x+x+)+y" + "(a|b|ab)*" * 20},
    *({"type": "array", "minItems": 10**9}, {"type": "string", "maxLength": 10**9}),
    *({"minimum": 2**70, "type": "integer"}, {"multipleOf": 0}, {"enum": []}, {"const": 10**400}),
    *({"enum": [str(n) for n in range(300)]}, {"not": {}}, {"allOf": [{"type": "null"}, False]}),
    *({"type": "object", "properties": 5}, {"required": "a"}, {"items": [1]}, {"anyOf": {}}),
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(200)}},
    {"type": "object", "patternProperties": {"(a+)+": {}}, "additionalProperties": False},
    *({"properties": {"": {}, "\0": {}}}, {"type": ["string", "null", 5]}, {"format": "x" * 50}),
)

TOOLS: tuple[Any, ...] = (
    {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "", "parameters": {}}},
    {"type": "function", "function": {"name": "f" * 100, "strict": True}},
    *({"type": "function"}, {"type": "web_search"}, {"type": "function", "function": "f"}),
    {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**80}}},
    {"type": "function", "function": {"name": "a b", "parameters": None, "description": 5}},
    {"name": "f", "input_schema": {"type": "object"}},
    *({"name": "f", "input_schema": 2**70}, {"type": "computer_20250124", "name": "computer"}),
)


def value(rng: random.Random) -> Any:
    """A hostile value, nearly always a small one."""
    roll = rng.random()
    if roll < 0.72:
        return rng.choice(SMALL)
    if roll < 0.82:
        return rng.choice(SCHEMAS)
    if roll < 0.90:
        tool = rng.choice(TOOLS)
        return [tool, *rng.choices(TOOLS, k=rng.randrange(3))] if rng.random() < 0.7 else tool
    if roll < 0.96:
        return rng.choice((nested, nested_objects))(rng.choice((3, 40, 200, DEEP)))
    return long(rng)


def long(rng: random.Random) -> Any:
    """Something long: kilobytes as a rule."""
    size = rng.choice((100, 1000, 3000, 20_000))
    match rng.randrange(6):
        case 0:
            return "x" * size
        case 1:
            return "\u4f60" * size
        case 2:
            return list(range(size))
        case 3:
            return ["s"] * size
        case 4:
            return {str(n): n % 7 for n in range(size)}
        case _:
            return Raw(b"1" * min(size, 4500))


def huge(rng: random.Random) -> bytes:
    """A whole body of megabytes: stop lists, prompts for many choices, one key many times."""
    count = rng.choice((300_000, 1_200_000))
    many = b'{"model":"echo","prompt":"a","messages":[{"role":"user","content":"a"}],"stop":['
    many += b",".join([b'"stop"'] * count) + b"]}"
    text = json.dumps("y" * (4 * count))
    wide = f'{{"model":"echo","n":128,"max_tokens":2,"prompt":{text},"input":{text}}}'.encode()
    same = b'{"model":"echo",' + b'"prompt":"a",' * (count // 2) + b'"max_tokens":2}'
    ids = b'{"model":"echo","max_tokens":2,"prompt":[' + b",".join([b"97"] * count) + b"]}"
    return rng.choice((many, wide, same, ids))
