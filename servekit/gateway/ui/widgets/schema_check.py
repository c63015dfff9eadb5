"""Checks schemas, and answers by a schema, with bounds, as visitors supply both.

The validator is jsonschema's, restricted in three ways. Patterns are not checked, because Python's
regular expressions can take exponential time; a constrained engine has already enforced them.
Nothing is downloaded: a `$ref` out of the schema is an error. The number of steps is bounded,
because branching references can multiply the work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from servekit.errors import RequestError

#: The most keywords evaluated in one validation.
MOST_STEPS = 20_000
MOST_SCHEMA_CHARS = 64_000
#: Keywords that contain values, not schemas.
_VALUES = frozenset(["const", "enum", "default", "examples"])


class TooMuch(Exception):
    """A validation has used up its steps."""


def json_of(text: str, what: str) -> Any:
    """Return the JSON that a visitor has typed. Raises RequestError with the place of an error."""
    if len(text) > MOST_SCHEMA_CHARS:
        raise RequestError(f"{what}: at most {MOST_SCHEMA_CHARS:,} characters")
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # as a request has it
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"{what} is not valid JSON: {error.msg} ({place})") from None
    except (RecursionError, ValueError):
        why = "is nested too deeply, or has numbers or characters that no request can have"
        raise RequestError(f"{what} {why}") from None
    return found


def check_schema(schema: Any, what: str) -> dict[str, Any]:
    """Return the schema if it is valid. Raises RequestError with the reason if not."""
    if not isinstance(schema, dict):
        raise RequestError(f"{what}: expected a JSON object, which a schema is here")
    problem = problem_of(Draft202012Validator.META_SCHEMA, schema, trusted=True)
    if problem:
        raise RequestError(f"{what} is not a JSON schema: {problem}")
    return schema


def problem_of(schema: Mapping[str, Any], value: Any, *, trusted: bool = False) -> str:
    """Return a sentence on how a value violates a schema; "" if it fits."""
    judge = _make_validator(schema if trusted else without_patterns(schema), trusted=trusted)
    try:
        error = best_match(judge.iter_errors(value))
    except TooMuch:
        return f"it takes more than {MOST_STEPS:,} steps to check"
    except RecursionError:
        return "its references are circular"
    except Unresolvable as missing:
        ref = getattr(missing, "anchor", "") or missing.ref
        return f"the reference {str(ref)[:80]!r} has no target"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # a reference to what is no schema, or a number that cannot be divided
        return f"it cannot be checked: {_shorten_message(str(error))}"
    if error is None:
        return ""
    where = "".join(f"[{step!r}]" for step in error.absolute_path)
    return f"{'at ' + where + ': ' if where else ''}{_shorten_message(error.message)}"


def judge_answer(schema: Mapping[str, Any], text: str) -> str:
    """Return a sentence on why an answer is not JSON that fits the schema; "" if it is."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {_shorten_message(str(error))}"
    return problem_of(schema, value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is Python's")


def without_patterns(schema: Any) -> Any:
    """Return a schema without regular expressions; it accepts whatever they would match."""
    if isinstance(schema, list):
        return [without_patterns(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value if key in _VALUES and not isinstance(value, dict) else without_patterns(value)
        for key, value in schema.items()
        if not (key == "pattern" and isinstance(value, str))
    }
    if isinstance(kept.get("patternProperties"), dict):
        for key in ("patternProperties", "additionalProperties", "unevaluatedProperties"):
            kept.pop(key, None)
    return kept


def _shorten_message(message: str) -> str:
    return message if len(message) <= 300 else f"{message[:300]}…"


def _make_validator(schema: Mapping[str, Any], *, trusted: bool) -> Any:
    left = [MOST_STEPS]
    keywords = {
        name: partial(_count_step, left, keyword)
        for name, keyword in Draft202012Validator.VALIDATORS.items()
    }
    bounded: Any = validators.extend(Draft202012Validator, keywords)  # type: ignore[no-untyped-call]
    # the meta-schemas refer to each other; a visitor's schema may refer only to itself
    return bounded(schema) if trusted else bounded(schema, registry=Registry())


def _count_step(
    left: list[int],
    keyword: Callable[..., Iterator[Any] | None],
    validator: Any,
    value: Any,
    instance: Any,
    schema: Any,
) -> Iterator[Any]:
    left[0] -= 1
    if left[0] < 0:
        raise TooMuch
    yield from keyword(validator, value, instance, schema) or ()
