"""libyaml's errors in plain words."""

from __future__ import annotations

from typing import Protocol

import yaml

from servekit.config.yaml.nodes import DocumentError, Mark

_ADVICE = {
    "mapping values are not allowed": "': ' is not allowed here; the indentation is off, or a "
    "text that contains ': ' needs quotes.",
    "did not find expected key": "the indentation does not fit the lines above.",
    "did not find expected '-' indicator": "the indentation does not fit the list above.",
    "could not find expected ':'": "there is no ':' after this key.",
    "found unexpected end of stream": "a quote or bracket is never closed.",
    "did not find expected ',' or": "a ',' or the closing bracket is missing.",
    "found unknown escape character": "unknown escape in a double-quoted text; write \\\\ for a "
    "backslash, or use single quotes.",
    "found undefined tag handle": "a text that begins with ! needs quotes.",
    "did not find expected alphabetic or numeric character": "a text that begins with * or & "
    "needs quotes.",
}


class YamlMark(Protocol):
    """A place in PyYAML's terms, counted from 0."""

    line: int
    column: int


def to_mark(mark: YamlMark | None) -> Mark:
    return Mark(mark.line + 1, mark.column + 1) if mark else Mark(1, 1)


def syntax_error(error: yaml.MarkedYAMLError, text: str) -> DocumentError:
    """Return the exception for `error`, found while parsing `text`."""
    mark = to_mark(error.problem_mark or error.context_mark)
    return DocumentError(_explain_problem(error, _line_at(text, mark), mark), mark)


def _explain_problem(error: yaml.MarkedYAMLError, line: str, mark: Mark) -> str:
    problem = error.problem or "this is not YAML"
    indentation = line[: len(line) - len(line.lstrip())]
    if "\t" in indentation and mark.column <= len(indentation) + 1:
        return "a tab is used for indentation; YAML wants spaces."
    if "cannot start any token" in problem:
        return f"a text that begins with {line[mark.column - 1 : mark.column]} needs quotes."
    advice = next((advice for key, advice in _ADVICE.items() if key in problem), f"{problem}.")
    begun = to_mark(error.context_mark).line if error.context_mark else mark.line
    return advice + (f" It began on line {begun}." if begun < mark.line else "")


def _line_at(text: str, mark: Mark) -> str:
    return next(iter(text.splitlines()[mark.line - 1 : mark.line]), "")
