"""Finds the end of a JSON value while the value is still being written."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'[^"\\]*')
_IN_WORD = re.compile(r"[-+.0-9A-Za-z]*")
#: Raised by `ast.literal_eval` for anything but literals, and for deep or long ones.
_NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")


class JsonReader:
    """Follows one JSON value, piece by piece.

    Errors inside a string that a strict parser refuses (a raw line break, an unknown escape) are
    accepted: they leave no doubt about the value's end, and the client sees what the model wrote.
    """

    __slots__ = ("_in_key", "_open", "_state", "_word", "broken", "done")

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._open: list[str] = []  # the closing brackets still to come
        # unbound, because a bound method would make a reference cycle
        self._state: _State = JsonReader._value
        self._in_key = False
        self._word = ""

    def scan(self, text: str, at: int) -> int:
        """Continue at `text[at]`; return the end of the value, or of its part in `text`."""
        while at < len(text) and not self.done and not self.broken:
            at = self._state(self, text, at)
        return at

    def _value(self, text: str, at: int) -> int:
        return self._begin(text, at, "")

    def _first_item(self, text: str, at: int) -> int:
        return self._begin(text, at, "]")

    def _begin(self, text: str, at: int, close: str) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        first = text[at]
        if first == close:
            return self._close(at)
        if first == '"':
            self._state, self._in_key = JsonReader._string, False
        elif first == "{":
            self._open.append("}")
            self._state = JsonReader._first_key
        elif first == "[":
            self._open.append("]")
            self._state = JsonReader._first_item
        elif first in "-0123456789tfn":
            self._state, self._word = JsonReader._in_word, ""
            return at
        else:
            return self._break(at)
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at < len(text) and text[at] == "}":
            return self._close(at)
        return self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        self._in_key = True
        return self._sign(text, at, '"', JsonReader._string)

    def _colon(self, text: str, at: int) -> int:
        return self._sign(text, at, ":", JsonReader._value)

    def _sign(self, text: str, at: int, sign: str, state: _State) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != sign:
            return self._break(at)
        self._state = state
        return at + 1

    def _string(self, text: str, at: int) -> int:
        at = _find_end(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = JsonReader._escape
        elif self._in_key:
            self._state = JsonReader._colon
        else:
            self._complete()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        self._state = JsonReader._string
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        stop = _find_end(_IN_WORD, text, at)
        self._word += text[at:stop]
        if stop < len(text):
            if _WORD.fullmatch(self._word) is None:
                return self._break(stop)
            self._complete()
        return stop

    def _after(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == self._open[-1]:
            return self._close(at)
        if text[at] != ",":
            return self._break(at)
        self._state = JsonReader._key if self._open[-1] == "}" else JsonReader._value
        return at + 1

    def _close(self, at: int) -> int:
        self._open.pop()
        self._complete()
        return at + 1

    def _complete(self) -> None:
        self.done = not self._open
        self._state = JsonReader._after

    def _break(self, at: int) -> int:
        self.broken = True
        return at


#: A state: reads from an index of a text, and returns the index where it stops.
_State = Callable[[JsonReader, str, int], int]


def is_json(text: str) -> bool:
    """Return whether `text` is exactly one JSON value, by the rules of JsonReader."""
    reader = JsonReader()
    return reader.scan(text + " ", 0) >= len(text) and reader.done


def is_strict_json(text: str) -> bool:
    """Return whether a strict parser accepts `text` as JSON."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def python_as_json(source: str) -> str:
    """Return a Python literal as JSON. Raises ValueError for anything else."""
    try:
        with warnings.catch_warnings(action="ignore"):  # unknown escapes are kept
            return written_as_json(ast.literal_eval(source))
    except _NO_LITERAL as error:
        raise ValueError("not a literal") from error


def written_as_json(value: Any) -> str:
    """Return a value as JSON text that UTF-8 can encode: lone surrogates stay escaped.

    Raises ValueError or TypeError for values that JSON lacks.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_encodable(text) else json.dumps(value, allow_nan=False)


def is_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode the text: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _skip_space(text: str, at: int) -> int:
    return _find_end(_SPACE, text, at)


def _find_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a pattern's match at `at`; the pattern may match nothing."""
    found = pattern.match(text, at)
    return at if found is None else found.end()
