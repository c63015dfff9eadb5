"""From a valid body to the bytes of one that may not be."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.fuzz import hostile
from tests.fuzz.hostile import Raw

#: How many mutations one body gets, by odds; some are sent as they are.
COUNTS = (0, 0, 1, 1, 1, 1, 1, 1, 2, 3, 6)
#: What is done, by odds. `alike` puts something of the same type, which is often taken.
CHANGES = {"put": 36, "alike": 30, "drop": 8, "twice": 5, "more": 8, "graft": 8, "wrap": 5}


class Pairs(list[tuple[str, Any]]):
    """An object as pairs, so that a key can stand in it twice."""


def tree(value: Any) -> Any:
    """The value with its objects as Pairs; a copy throughout."""
    if isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value
        return Pairs((key, tree(one)) for key, one in pairs)
    if isinstance(value, list):
        return [tree(one) for one in value]
    return value


def dump(value: Any) -> bytes:
    """Its bytes; what is Raw goes as it is."""
    match value:
        case Raw():
            return bytes(value)
        case Pairs():
            inner = (json.dumps(key).encode() + b":" + dump(one) for key, one in value)
            return b"{" + b",".join(inner) + b"}"
        case list():
            return b"[" + b",".join(map(dump, value)) + b"]"
        case dict():
            return dump(Pairs(value.items()))
        case _:
            return json.dumps(value).encode()


def places(value: Any) -> list[tuple[Any, int]]:
    """Everywhere in the tree: a container, and an index into it."""
    found: list[tuple[Any, int]] = []
    if isinstance(value, list):
        for at, one in enumerate(value):
            found.append((value, at))
            found += places(one[1] if isinstance(value, Pairs) else one)
    return found


def body(rng: random.Random, valid: Any) -> bytes:
    """A body, most often mutated in one place."""
    root = tree(valid)
    for _ in range(rng.choice(COUNTS)):
        where = places(root)
        if where:
            _change(rng, where)
    data = dump(root)
    return _spoil(rng, data) if rng.random() < 0.06 else data


def _change(rng: random.Random, where: list[tuple[Any, int]]) -> None:
    container, at = rng.choice(where)
    match rng.choices(tuple(CHANGES), tuple(CHANGES.values()))[0]:
        case "put":
            _put(container, at, tree(hostile.value(rng)))
        case "alike":
            _put(container, at, tree(_alike(rng, _get(container, at))))
        case "drop":
            del container[at]
        case "twice":
            container.insert(at, container[at])
            _put(container, at, tree(hostile.value(rng)))
        case "more":
            _add(rng, container)
        case "graft":
            other, index = rng.choice(where)
            _put(container, at, tree(json.loads(_plain(_get(other, index)))))
        case "wrap":
            one = _get(container, at)
            _put(container, at, rng.choice(([one], Pairs([("a", one)]), _copies(one))))


def _alike(rng: random.Random, value: Any) -> Any:
    """Another value of the same type, where there is one."""
    same = [one for one in hostile.SMALL if type(one) is type(value)]
    if isinstance(value, list | Pairs) and rng.random() < 0.8:
        return rng.choices(value, k=rng.randrange(4)) if type(value) is list and value else value
    return rng.choice(same) if same else hostile.value(rng)


def _copies(value: Any) -> list[Any]:
    data = _plain(value)
    return [Raw(data)] * 40


def _plain(value: Any) -> bytes:
    """Its bytes if they are JSON, for a copy; null otherwise."""
    try:
        data = dump(value)
        json.loads(data)
    except (ValueError, RecursionError):
        return b"null"
    return data


def _get(container: Any, at: int) -> Any:
    return container[at][1] if isinstance(container, Pairs) else container[at]


def _put(container: Any, at: int, value: Any) -> None:
    container[at] = (container[at][0], value) if isinstance(container, Pairs) else value


#: Keys that some endpoint knows, for those that do not.
KEYS = (
    "model", "stream", "n", "stop", "tools", "tool_choice", "logprobs", "echo", "best_of", "images",
    "functions", "response_format", "format", "grammar", "think", "system", "options", "audio",
    "max_tokens", "timeout_s", "seed", "logit_bias", "__proto__", "", "x" * 2000, "messages",
)  # fmt: skip


def _add(rng: random.Random, container: Any) -> None:
    value = tree(hostile.value(rng))
    container.append((rng.choice(KEYS), value) if isinstance(container, Pairs) else value)


def _spoil(rng: random.Random, data: bytes) -> bytes:
    """No mutation of the value, but of its bytes."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 2:
            return data[:at] + data[at + 1 :]
        case 3:
            return b"\xef\xbb\xbf" + data
        case 4:
            return data.decode("latin-1").encode("utf-16")
        case 5:
            return data + rng.choice((b"x", b"\0", b"{}", b" " * 500, b"]"))
        case 6:
            return rng.randbytes(rng.randrange(200))
        case _:
            return rng.choice((b"", b"null", b"[]", b"1", b'"a"', b" ", b"{" * 9000, b"\0"))
