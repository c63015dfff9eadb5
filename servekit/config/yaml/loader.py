"""A YAML parser whose nodes keep their place in the file.

PyYAML's own loader forgets lines, silently keeps the last of two equal keys, reads `1:30` as 90 and
expands aliases without bound. This one reads libyaml's events itself. Plain words follow YAML 1.1
without its surprises: no dates, no base 60, no octal by a leading zero, `1e-3` is a number, and a
key is always text (`NO:` and `ON:` are names of environment variables).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import yaml

from servekit.config.yaml.nodes import DocumentError, Mark, Node, Scalar, mark_at

if TYPE_CHECKING:
    from yaml._yaml import Mark as LibyamlMark

_ADVICE = {
    "mapping values are not allowed": "': ' is not allowed here; the indentation is off, or a "
    "text that contains ': ' needs quotes.",
    "did not find expected node content": "a value is missing here, or a bracket is not closed.",
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
MAX_DEPTH = 32
MAX_NODES = 50_000  # aliases counted in full
MAX_INT = 2**63 - 1  # no message carries more; a larger number is not a whole one

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STR_TAG = "tag:yaml.org,2002:str"
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULLS = {"", "~", "null"}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,2}(_[0-9]{3}){1,12}|[1-9][0-9]{0,40})")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,32}")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_UNPRINTABLE = re.compile(
    r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"  # per YAML 1.1
)


def parse_document(text: str) -> Node:
    """Compose one YAML document; raises DocumentError."""
    if bad := _UNPRINTABLE.search(text):
        what = f"unprintable character (U+{ord(bad[0]):04X})."
        raise DocumentError(what, mark_at(text, bad.start()))
    try:
        root = _Composer(yaml.parse(text, Loader=_LOADER)).document()
    except yaml.MarkedYAMLError as error:
        raise syntax_error(error, text) from None
    except yaml.YAMLError as error:
        raise DocumentError(f"not YAML: {error}.") from None
    if not isinstance(root.value, dict):
        raise DocumentError("the file must be a mapping with a key `models`.", root.mark)
    return root


class _Composer:
    """Builds nodes from events; the recursion depth is limited to MAX_DEPTH."""

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self._events = events
        self._anchors: dict[str | None, Node | None] = {}  # None while under construction
        self._nodes = 0

    def document(self) -> Node:
        next(self._events)  # stream start
        first = next(self._events)
        if isinstance(first, yaml.StreamEndEvent):
            raise DocumentError("the file is empty.")
        root = self._node(next(self._events), 0)
        next(self._events)  # document end
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise DocumentError(
                "a second document begins here; a file holds one.", to_mark(after.start_mark)
            )
        if root.value is None:
            raise DocumentError("the file is empty.")
        return root

    def _node(self, event: yaml.Event, depth: int) -> Node:
        mark = to_mark(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event.anchor, mark)
        self._count(1, mark)
        if depth > MAX_DEPTH:
            raise DocumentError(f"nested more than {MAX_DEPTH} deep.", mark)
        anchor = getattr(event, "anchor", None)
        self._anchors[anchor] = None
        node = self._anchors[anchor] = self._build(event, mark, depth)
        return node

    def _build(self, event: yaml.Event, mark: Mark, depth: int) -> Node:
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", _STR_TAG):
            short = tag.replace("tag:yaml.org,2002:", "!!")[:40]
            raise DocumentError(f"the tag {short} is not supported.", mark)
        if isinstance(event, yaml.ScalarEvent):
            _check_text(event.value, mark)
            is_plain = event.implicit[0] and tag is None
            return Node(
                mark, _resolve_scalar(event.value) if is_plain else event.value, event.value
            )
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(mark, depth)
        return self._mapping(mark, depth)

    def _alias(self, anchor: str | None, mark: Mark) -> Node:
        node = self._anchors.get(anchor)
        if node is None:
            what = "contains itself" if anchor in self._anchors else "is not defined above"
            raise DocumentError(f"the alias *{(anchor or '')[:40]} {what}.", mark)
        self._count(node.size, mark)
        return Node(mark, node.value, node.text, node.keys, node.size)

    def _sequence(self, mark: Mark, depth: int) -> Node:
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return Node(mark, items, size=1 + sum(item.size for item in items))

    def _mapping(self, mark: Mark, depth: int) -> Node:
        values: dict[str, Node] = {}
        keys: dict[str, Mark] = {}
        merged: list[Node] = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key, key_mark = _read_key(event), to_mark(event.start_mark)
            value = self._node(next(self._events), depth + 1)
            if key == "<<":
                merged.append(value)
                continue
            if key in keys:
                raise DocumentError(
                    f"the key '{key[:40]}' is written twice; first on line {keys[key].line}.",
                    key_mark,
                )
            values[key], keys[key] = value, key_mark
        for source in merged:
            _merge_keys(source, values, keys)
        return Node(mark, values, keys=keys, size=1 + sum(v.size for v in values.values()))

    def _count(self, nodes: int, mark: Mark) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise DocumentError(f"more than {MAX_NODES} values, aliases expanded.", mark)


def _merge_keys(source: Node, values: dict[str, Node], keys: dict[str, Mark]) -> None:
    """Merge `<<: *other`: add the missing keys, from the first source that has them."""
    if isinstance(source.value, list):
        for item in source.value:
            _merge_keys(item, values, keys)
        return
    if not isinstance(source.value, dict):
        raise DocumentError("`<<` merges a mapping, such as *name.", source.mark)
    for key, node in source.value.items():
        if key not in values:
            values[key], keys[key] = node, source.keys[key]


def _read_key(event: yaml.Event) -> str:
    if not isinstance(event, yaml.ScalarEvent):
        raise DocumentError("a key must be plain text.", to_mark(event.start_mark))
    _check_text(event.value, to_mark(event.start_mark))
    return str(event.value)


def _check_text(text: str, mark: Mark) -> None:
    """Reject unprintable characters from escapes such as "\\0", invalid in paths and names."""
    bad = _UNPRINTABLE.search(text)
    if bad:
        raise DocumentError(f"this text holds an unprintable U+{ord(bad[0]):04X}.", mark)


def _resolve_scalar(text: str) -> Scalar:
    """Return the value of a plain (unquoted) scalar."""
    lower = text.lower()
    if lower in _NULLS:
        return None
    if lower in _BOOLS:
        return _BOOLS[lower]
    base = 10 if _INT.fullmatch(text) else 16 if _HEX.fullmatch(text) else 0
    if base:
        number = int(text, base)
        return number if abs(number) <= MAX_INT else float(number)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return float(text)
    return float(lower.replace(".", "")) if _NOT_FINITE.fullmatch(text) else text


def to_mark(mark: yaml.Mark | LibyamlMark | None) -> Mark:
    """Return a place as we count: PyYAML counts from 0."""
    return Mark(mark.line + 1, mark.column + 1) if mark else Mark(1, 1)


def syntax_error(error: yaml.MarkedYAMLError, text: str) -> DocumentError:
    """Return the exception for `error`, found while parsing `text`."""
    mark = to_mark(error.problem_mark or error.context_mark)
    if clearer := _find_missing_blank(text, _lines_to_blame(error, mark)):
        return clearer
    return DocumentError(_explain_problem(error, _line_at(text, mark), mark), mark)


#: A key and its value without the blank between them, as in `- name:a`.
_NO_BLANK = re.compile(r"^\s*(?:- +)?([A-Za-z_]\w*):([^\s/:][^:]*)$")


def _lines_to_blame(error: yaml.MarkedYAMLError, mark: Mark) -> tuple[int, ...]:
    """Return the numbers of the lines that may lack the blank after a colon."""
    problem = error.problem or ""
    if "mapping values are not allowed" in problem:
        return mark.line - 1, mark.line
    if "could not find expected ':'" in problem and error.context_mark is not None:
        return (to_mark(error.context_mark).line,)
    return ()


def _find_missing_blank(text: str, lines: tuple[int, ...]) -> DocumentError | None:
    """Return the error of the first of these lines that lacks the blank after its colon."""
    for number in lines:
        found = _NO_BLANK.match(_line_at(text, Mark(number, 1))) if number > 0 else None
        if found is not None:
            said = f"a blank is missing after the colon: write `{found[1]}: {found[2]}`."
            return DocumentError(said, Mark(number, found.start(1) + 1))
    return None


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
