"""Whether a schema is one, and whether an answer keeps to it; bounded, as both are anybody's.

The validator is jsonschema's, with three things taken from it. Patterns are not looked at, as
Python's regular expressions can be made to take for ever: where the engine is held to the schema
it has kept to them. Nothing is fetched: a `$ref` that leads out of the schema is an error. And it
has so many steps, not more: references that branch can mean more work than there is time.
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

#: Keywords looked at in one validation.
MOST_STEPS = 20_000
MOST_SCHEMA_CHARS = 64_000
#: Where a schema has no schemas, only values.
_VALUES = frozenset(["const", "enum", "default", "examples"])


class TooMuch(Exception):
    """A validation has used up its steps."""


def json_of(text: str, what: str) -> Any:
    """The JSON that a visitor has typed. Raises RequestError that says where it is wrong."""
    if len(text) > MOST_SCHEMA_CHARS:
        raise RequestError(f"{what}: at most {MOST_SCHEMA_CHARS:,} characters")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"{what} is not valid JSON: {error.msg} ({place})") from None
    except (RecursionError, ValueError):
        raise RequestError(f"{what} is nested too deeply, or has numbers too long") from None


def checked(schema: Any, what: str) -> dict[str, Any]:
    """The schema, if it is one. Raises RequestError that says why it is not."""
    if not isinstance(schema, dict):
        raise RequestError(f"{what}: expected a JSON object, which a schema is here")
    problem = problem_of(Draft202012Validator.META_SCHEMA, schema, trusted=True)
    if problem:
        raise RequestError(f"{what} is not a JSON schema: {problem}")
    return schema


def problem_of(schema: Mapping[str, Any], value: Any, *, trusted: bool = False) -> str:
    """What is wrong with a value by a schema, in a sentence; "" if nothing is."""
    judge = _validator(schema if trusted else without_patterns(schema), trusted=trusted)
    try:
        error = best_match(judge.iter_errors(value))
    except TooMuch:
        return f"it takes more than {MOST_STEPS:,} steps to find out"
    except RecursionError:
        return "its references lead round in circles"
    except Unresolvable as missing:
        return f"the reference {str(missing.ref)[:80]!r} leads to nothing"
    if error is None:
        return ""
    where = "".join(f"[{step!r}]" for step in error.absolute_path)
    return f"{'at ' + where + ': ' if where else ''}{_short(error.message)}"


def verdict(schema: Mapping[str, Any], text: str) -> str:
    """What is wrong with an answer; "" if it is JSON that keeps to the schema."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {_short(str(error))}"
    return problem_of(schema, value)


def without_patterns(schema: Any) -> Any:
    """A schema without regular expressions; what they would have matched is let pass."""
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


def _short(message: str) -> str:
    return message if len(message) <= 300 else f"{message[:300]}…"


def _validator(schema: Mapping[str, Any], *, trusted: bool) -> Any:
    left = [MOST_STEPS]
    keywords = {
        name: partial(_counted, left, keyword)
        for name, keyword in Draft202012Validator.VALIDATORS.items()
    }
    bounded: Any = validators.extend(Draft202012Validator, keywords)  # type: ignore[no-untyped-call]
    # the meta-schemas refer to each other; what a visitor's refers to is in it, or nowhere
    return bounded(schema) if trusted else bounded(schema, registry=Registry())


def _counted(
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
