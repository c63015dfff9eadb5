"""Errors of a configuration, in plain words and with their place in the file.

pydantic's errors name its types; these say what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from pydantic_core import ErrorDetails

from servekit.config import foreign_keys
from servekit.config.base_model import FORMS, Section, read_field_docs
from servekit.config.engines import plugins
from servekit.config.engines.options import ENGINE_OPTIONS
from servekit.config.schema import Config
from servekit.config.sections.scale import BRANCHES
from servekit.config.yaml.nodes import Loc, Node, find_node, format_place
from servekit.errors import ConfigError

MAX_PROBLEMS = 20

_SYNONYMS = {
    "gpu": "cuda",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "model": "path",
    "id": "name",
    "workers": "replicas",
    "count": "replicas",
    "engine_args": "options",
}
_OF_A_PACKAGE = "If a package brings this engine, install that beside servekit: pip install …"
#: What people write for no value.
_NOTHING = {"none", "null", "nil", "unlimited", "off"}
#: Mappings that may hold secrets: a text in their place is not shown.
_OF_SECRETS = {("env",), ("headers",)}
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "path_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of key: value",
    "model_type": "a mapping of key: value",
    "model_attributes_type": "a mapping of key: value",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "string_too_short": "text that is not empty",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "literal_error": "{expected}",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error. `loc` is its place; `at_key` blames the key instead of the value."""

    loc: tuple[str | int, ...]
    message: str
    at_key: bool = False


def config_error(path: Path, root: Node, problems: Iterable[Problem]) -> ConfigError:
    """Return the error that lists `problems`, one per line, in the order of the file."""
    lines = sorted({_line(path, root, problem) for problem in problems})
    shown = [text for _, text in lines[:MAX_PROBLEMS]]
    if len(lines) > MAX_PROBLEMS:
        shown.append(f"{path}: and {len(lines) - MAX_PROBLEMS} more.")
    return ConfigError("\n".join(shown))


def _line(path: Path, root: Node, problem: Problem) -> tuple[tuple[int, int], str]:
    found = find_node(root, problem.loc)
    mark = found.key if problem.at_key or found.depth < len(problem.loc) else found.node.mark
    where = f" {dotted_path(problem.loc)}:" if problem.loc else ""
    return (mark.line, mark.column), f"{format_place(path, mark)}:{where} {problem.message}"


def dotted_path(loc: Loc) -> str:
    """Format `("models", 0, "name")` as `models[0].name`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shorten_text(part)}" for part in loc)
    return "".join(parts).removeprefix(".")


# ---------------------------------------------------------------- from pydantic


def explain_errors(errors: Sequence[ErrorDetails], root: Node, prefix: Loc = ()) -> list[Problem]:
    """Turn pydantic's errors into problems; the branches of a union become one."""
    placed = [(_trim((*prefix, *error["loc"]), error, root), error) for error in errors]
    placed = [(loc, error) for loc, error in placed if not _is_consequence(error)]
    # a branch that the value is not of, where another one blames a part of the value
    inner = {loc[:length] for loc, _ in placed for length in range(len(loc))}
    placed = [(loc, error) for loc, error in placed if loc not in inner]
    groups = groupby(placed, key=lambda item: item[0])
    return [_problem(loc, [error for _, error in group], root) for loc, group in groups]


def _trim(loc: tuple[str | int, ...], error: ErrorDetails, root: Node) -> tuple[str | int, ...]:
    """Cut the parts that pydantic appends: the branch of a union, `[key]`."""
    written: list[str | int] = []
    for part in loc:
        is_of_list = isinstance(find_node(root, written).node.value, list)
        if part not in BRANCHES and not (is_of_list and isinstance(part, str)):
            written.append(part)
    loc = tuple(written)
    depth = find_node(root, loc).depth
    return loc[: depth + 1] if error["type"] == "missing" else loc[:depth]


def _is_consequence(error: ErrorDetails) -> bool:
    """Return whether pydantic calls a list too short only because its items are invalid."""
    return error["type"] == "too_short" and bool(error["input"])


def _problem(loc: tuple[str | int, ...], errors: list[ErrorDetails], root: Node) -> Problem:
    first = errors[0]
    if first["type"] == "missing":
        is_written = find_node(root, loc).depth == len(loc)
        inner = str(first["loc"][-1])
        if inner != loc[-1]:  # the mapping that it belongs to is missing, too
            purpose = _purpose((*loc, inner), root)
            return Problem(loc, f"missing; it must have '{inner}': {purpose}")
        return missing_key(loc, root, is_written=is_written)
    if first["type"] == "extra_forbidden":
        return Problem(loc, _unknown_key(loc, root), at_key=True)
    is_key = first["loc"][-1:] == ("[key]",)
    if form := FORMS.get(first.get("ctx", {}).get("pattern", "")):
        return Problem(loc, f"must be {form}.", at_key=is_key)  # the text may hold a secret
    node = find_node(root, loc).node
    wanted = [_describe_limits(e) for e in errors if e["type"] in _EXPECTED]
    if not wanted:
        return Problem(loc, f"{_own_words(first)}.", at_key=is_key)
    wanted = [text.replace("'", "") for text in dict.fromkeys(wanted)]
    if loc[:1] == ("keys",) and len(loc) < 3 and isinstance(node.value, str):
        return Problem(loc, f"is no mapping; {foreign_keys.OF_A_KEY['key']}.")
    if loc[-1:] in _OF_SECRETS and isinstance(node.value, str):
        return Problem(loc, f"must be {' or '.join(wanted)}.")
    message = f"must be {' or '.join(wanted)}, but is {describe_value(node)}."
    if isinstance(node.value, str) and node.value.lower() in _NOTHING and _is_optional(loc, root):
        return Problem(loc, f"{message} Leave out the key instead.")
    return Problem(loc, message + _hint(node, wanted, first))


def _is_optional(loc: tuple[str | int, ...], root: Node) -> bool:
    section = _section(loc[:-1], root)
    field = section.model_fields.get(str(loc[-1])) if section else None
    return field is not None and not field.is_required()


def missing_key(loc: tuple[str | int, ...], root: Node, *, is_written: bool = False) -> Problem:
    """Return the problem of a key that is not there, or that `is_written` without a value."""
    return Problem(loc, f"{'has no value' if is_written else 'missing'}; {_purpose(loc, root)}")


def _describe_limits(error: ErrorDetails) -> str:
    limits = error.get("ctx", {})
    return _EXPECTED[error["type"]].format(
        **{k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in limits.items()}
    )


def _own_words(error: ErrorDetails) -> str:
    """Return the message of a validator of servekit, else pydantic's."""
    return str(error.get("ctx", {}).get("error", error["msg"])).rstrip(".")


def describe_value(node: Node) -> str:
    """Describe a value in the terms of a reader of the file."""
    match node.value:
        case None:
            return "empty"
        case bool():
            return f"the truth value {node.text}"
        case int() | float():
            return f"the number {shorten_text(node.text)}"
        case str():
            return f"the text '{shorten_text(node.value)}'"
        case list():
            return "a list" if node.value else "an empty list"
    return "a mapping"


def shorten_text(text: str) -> str:
    """Return `text` on one line, truncated for a message."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def _hint(node: Node, wanted: list[str], error: ErrorDetails) -> str:
    scalar = not isinstance(node.value, list | dict)
    key = str(error["loc"][-1]) if error["loc"] else ""
    if key in ("memory", "reserve") and isinstance(node.value, float | int):
        return f" {_suggest_memory(node.value)}"
    if isinstance(node.value, str) and (ours := foreign_keys.VALUES.get(key, {}).get(node.value)):
        return f" Write {ours}."
    if key.endswith("_s") and isinstance(node.value, str):
        return (
            " Write seconds, 300, or 5m." if not node.value.isdigit() else " Leave out the quotes."
        )
    if wanted == ["text"] and scalar and not isinstance(node.value, str):
        return f' Put it in quotes: "{shorten_text(node.text)}".'
    if wanted == ["a list"] and scalar:
        return f" Write [{shorten_text(node.text)}]."
    if error["type"] == "literal_error" and isinstance(node.value, str):
        choices = error.get("ctx", {}).get("expected", "").replace("'", "")
        guess = _did_you_mean(node.value, choices.replace(" or ", ", ").split(", "))
        return guess or (f" {_OF_A_PACKAGE}" if key == "engine" else "")
    is_quoted = isinstance(node.value, str) and node.value.replace(".", "", 1).isdigit()
    return " Leave out the quotes." if is_quoted and "number" in wanted[0] else ""


def _suggest_memory(number: float) -> str:
    """Return the advice for memory without a unit: a share up to 1, GiB, or bytes from 1 MiB on."""
    if not 0 < number < 2**63:
        return "Write 20GiB, or 40% of the GPU."
    if number >= 2**20:
        return f"Write {number / 2**20:.0f}MiB."
    if number <= 1:
        return f"Write {number * 100:g}%, a share of the GPU, or 20GiB."
    return f"Write {number:g}GiB, or {min(number, 100):g}% of the GPU."


def explain_mapping(root: Node) -> Problem | None:
    """Return the problem of `models` as a mapping of names, as other programs have it."""
    models = find_node(root, ("models",))
    if models.depth != 1 or not isinstance(models.node.value, dict) or not models.node.value:
        return None
    name, first = next(iter(models.node.value.items()))
    keys = first.value if isinstance(first.value, dict) else {}
    if "cmd" in keys:
        return Problem(
            ("models",),
            "this is llama-swap's form; `servekit init --from llama-swap FILE` converts it.",
        )
    path = keys["path"].text if "path" in keys else "…"
    return Problem(
        ("models",),
        "must be a list, but is a mapping. Write each model as an item with its name: "
        f"models: [{{name: {shorten_text(name)}, path: {shorten_text(path)}, …}}]; or, on lines of "
        f"their own, `- name: {shorten_text(name)}` and below it `  path: {shorten_text(path)}`.",
    )


# ---------------------------------------------------------------- keys


def _section(loc: Loc, root: Node) -> type[Section] | None:
    """Return the schema of the mapping at `loc`; None where the schema defines no keys there."""
    match tuple(loc):
        case ("models", int() as index, "options"):
            engine = find_node(root, ("models", index, "engine"))
            name = engine.node.value if engine.depth == 3 else "transformers"
            return plugins.options_of(str(name))
    section: type[Section] | None = Config
    for part in loc:
        if section is not None and isinstance(part, str):
            field = section.model_fields.get(part)
            section = None if field is None else _section_in(field.annotation)
    return section


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the schema of the mappings in a field: directly, in a list, or in a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _unknown_key(loc: tuple[str | int, ...], root: Node) -> str:
    section, key = _section(loc[:-1], root), str(loc[-1])
    if advice := foreign_keys.advise(loc, find_node(root, loc).node.value):
        return f"unknown key; {advice}."
    valid = list(section.model_fields) if section else []
    if elsewhere := _home_of(key, loc, root):
        return f"unknown key here; {elsewhere}."
    guess = _did_you_mean(key, valid)
    return "unknown key." + (guess or (f" Valid here: {', '.join(valid)}." if valid else ""))


def _home_of(key: str, loc: tuple[str | int, ...], root: Node) -> str:
    """Describe where a key that is valid elsewhere belongs, or return ""."""
    model = loc[:2] if loc[0] == "models" and len(loc) > 2 else ("models", 0)
    homes: list[tuple[str | int, ...]] = [(*loc[:-1], "sampling"), model, (*model, "sampling")]
    homes.append((*model, "options"))
    for home in [*homes, ("server",), ("gpus",), ()]:
        section = _section(home, root)
        if section and key in section.model_fields and home != loc[:-1]:
            where = f"under {dotted_path(home)}" if home else "at the top of the file"
            return f"'{key}' belongs {where}"
    for engine, options in ENGINE_OPTIONS.items():
        if "options" in loc[:-1] and key in options.model_fields:
            return f"'{key}' is an option of `engine: {engine}`"
    return ""


def _did_you_mean(word: str, valid: list[str]) -> str:
    plain = word.lower().replace("-", "_")
    synonym = _SYNONYMS.get(plain)
    if synonym in valid:
        return f" Did you mean '{synonym}'?"
    close = get_close_matches(plain, valid, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _purpose(loc: tuple[str | int, ...], root: Node) -> str:
    section = _section(loc[:-1], root)
    docs = read_field_docs(section) if section else {}
    text = " ".join(docs.get(str(loc[-1]), "").split())
    if text[1:2].isupper():  # PEM, TCP
        return text
    return (text[:1].lower() + text[1:]) or "it must be written."
