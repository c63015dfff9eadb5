"""Models of another program, and the configuration file that serves them here."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servekit.cli.init.config_template import yaml_scalar
from servekit.config import paths
from servekit.errors import ConfigError

_WIDTH = 98
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
#: A word of a command that needs no quotes, placeholders included.
_PLAIN_WORD = re.compile(r"[\w@%+=:,./{}~-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Carried:
    """The text of a configuration file, and a line for each setting that was left out."""

    text: str
    left_out: tuple[str, ...]


@dataclass(slots=True)
class BroughtModel:
    """A model's section of the file. Without keys, only its comments are written."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)  # paragraphs above it
    notes: list[str] = field(default_factory=list)  # settings that are not carried over
    hints: list[str] = field(default_factory=list)  # lines below it, commented out


class Command(list[str]):
    """The words of a command, written as text that a person can edit."""


def compose_file(
    head: Iterable[str],
    models: Iterable[BroughtModel],
    tail: Mapping[str, Any],
    notes: Iterable[str] = (),
) -> str:
    """Return the text of a file with `models`; `notes` are settings of no model, left out."""
    lines = [*_comment("", head), *_comment("", (f"Not carried over: {note}" for note in notes))]
    lines += ["#", "#     servekit check THIS_FILE", "#     servekit up --config THIS_FILE"]
    lines += ["", "models:"]
    for model in models:
        lines += [*_model_lines(model), ""]
    return "\n".join([*lines, *_emit(tail, "")]) + "\n"


def left_out_lines(models: Iterable[BroughtModel], notes: Iterable[str]) -> tuple[str, ...]:
    """Return a line for each setting that was left out."""
    of_models = (f"{model.name}: {note}" for model in models for note in model.notes)
    return (*notes, *of_models)


def require_models(models: Iterable[BroughtModel], source: str) -> None:
    """Raise ConfigError if none of the models can be served."""
    models = list(models)
    if not any("engine" in model.keys for model in models):
        reasons = "".join(f"\n{line}" for line in left_out_lines(models, ()))
        raise ConfigError(f"none of the models of {source} can be brought:{reasons}")


def valid_name(text: str) -> str:
    """Turn a name into one that a model may have here."""
    if _NAME.fullmatch(text):
        return text
    return re.sub(r"[^A-Za-z0-9._:/-]+", "-", text).strip("._:/-")[:128] or "model"


def name_models(models: Iterable[BroughtModel]) -> None:
    """Give models valid names, no two alike; keep aliases and presets whose names are valid and
    free.
    """
    models = list(models)
    taken: set[str] = set()
    for model in models:
        model.keys["name"] = _free_name(valid_name(model.name), taken)
        if model.keys["name"] != model.name and "engine" in model.keys:
            model.notes.append(
                f"its name cannot be one here; requests ask for {model.keys['name']}"
            )
    for model in models:
        presets = model.keys.pop("presets", ())
        if presets := [one for one in presets if _keep_alias(one["name"], model, taken)]:
            model.keys["presets"] = presets
    for model in models:
        kept = [one for one in model.keys.pop("aliases", ()) if _keep_alias(one, model, taken)]
        if kept:
            _insert_after_name(model.keys, aliases=kept)
        else:
            _insert_after_name(model.keys)


def _free_name(name: str, taken: set[str]) -> str:
    free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, 10_000))) if n not in taken)
    taken.add(free)
    return free


def _keep_alias(alias: str, model: BroughtModel, taken: set[str]) -> bool:
    if alias == model.keys["name"]:
        return False
    if alias in taken or not _NAME.fullmatch(alias):
        model.notes.append(f"alias {alias!r}: it is taken, or cannot be a name here")
        return False
    taken.add(alias)
    return True


def _insert_after_name(keys: dict[str, Any], **more: Any) -> None:
    """Order the keys: the name first, then `more`."""
    ordered = {"name": keys.pop("name"), **more, **keys}
    keys.clear()
    keys.update(ordered)


def resolve_model(text: str, folder: Path | None = None) -> tuple[str, str]:
    """Return the path of a model for the file, and why it cannot be served as it is, or "".

    It is relative to `folder`, by default the working directory.
    """
    try:
        path = paths.check_model_path(text, folder or Path.cwd())
    except ValueError as error:
        return text, str(error)
    return (text if path.revision else path.text), ""


# ---------------------------------------------------------------- the text


def _model_lines(model: BroughtModel) -> Iterator[str]:
    notes = (f"Not carried over: {note}" for note in model.notes)
    yield from _comment("  ", (*model.comments, *notes))
    if "engine" in model.keys:
        first, *rest = _emit(model.keys, "    ")
        yield f"  - {first.strip()}"
        yield from rest
    else:
        yield f"  # {model.name} is left out."
    yield from (f"    # {line}" for line in model.hints)


def emit_lines(keys: Mapping[str, Any]) -> list[str]:
    """Return the lines of a mapping in YAML."""
    return list(_emit(keys, ""))


def _comment(indent: str, paragraphs: Iterable[str]) -> Iterator[str]:
    begin, go_on = f"{indent}# ", f"{indent}#   "
    for text in paragraphs:
        yield from textwrap.wrap(
            *(" ".join(text.split()), _WIDTH),
            initial_indent=begin,
            subsequent_indent=go_on,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _emit(keys: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a mapping in YAML."""
    for key, value in keys.items():
        begin = f"{indent}{yaml_scalar(key)}:"
        if isinstance(value, Command):
            yield from _command_lines(begin, value, f"{indent}  ")
        elif isinstance(value, Mapping):
            yield begin
            yield from _emit(value, f"{indent}  ")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            yield begin
            for item in value:
                first, *rest = _emit(item, f"{indent}    ")
                yield from (f"{indent}  - {first.strip()}", *rest)
        elif isinstance(value, str):
            yield f"{begin} {yaml_scalar(value)}"
        else:
            yield f"{begin} {json.dumps(value, ensure_ascii=False)}"


def _command_lines(begin: str, words: Command, indent: str) -> Iterator[str]:
    """Yield a command as folded text, an option a line; as a list if a word has odd characters."""
    if any(not word.isprintable() for word in words):
        yield f"{begin} {json.dumps(list(words), ensure_ascii=False)}"
        return
    yield f"{begin} >-"
    line = ""
    for word in map(quote_word, words):
        starts = word.startswith("-") or len(f"{indent}{line} {word}") > _WIDTH
        if line and starts:
            yield indent + line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield indent + line


def quote_word(word: str) -> str:
    """Quote a word of a command for a shell, or for `command` in the file."""
    return word if _PLAIN_WORD.fullmatch(word) else shlex.quote(word)
