"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from servekit.docs.pages import make_anchor

_NUMBERS = "int", "integer", "integer range", "float", "float range"
_WORDS = {**dict.fromkeys(_NUMBERS, "NUMBER"), "Path": "PATH", "path": "PATH"}


def make_sections() -> str:
    """Return Markdown: a list of the commands, and a section for each with its options."""
    import typer

    from servekit.cli.main import app

    found = list(_commands(typer.main.get_command(app), "servekit"))
    lines = [f"- [`{name}`](#{make_anchor(name)}): {_first(command)}" for name, command in found]
    parts = ["\n".join(lines)]
    for name, command in found:
        parts += [f"## {name}", *_described(name, command)]
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all executable commands with their full names."""
    for part, one in command.commands.items():
        if one.hidden:
            continue
        if hasattr(one, "commands"):
            yield from _commands(one, f"{name} {part}")
        else:
            yield f"{name} {part}", one


def _first(command: Any) -> str:
    return str(command.get_short_help_str(limit=200))


def _described(name: str, command: Any) -> Iterator[str]:
    shown = [one for one in command.params if not one.hidden]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    words = " ".join(_argument(one) for one in arguments)
    yield f"```sh\n{name}{' ' if words else ''}{words} [OPTIONS]\n```"
    yield "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    rows = [f"| {_names(one)} | {_value(one)} | {_default(one)} | {_help(one)} |" for one in shown]
    if rows:
        yield "\n".join(["| | value | default | |", "|---|---|---|---|", *rows])


def _argument(one: Any) -> str:
    word = _metavar(one)
    return word if one.required else f"[{word}]"


def _metavar(one: Any) -> str:
    return str(one.metavar or one.name.upper().replace("_", "-")).strip("[]")


def _names(one: Any) -> str:
    if one.param_type_name == "argument":
        return f"`{_metavar(one)}`"
    return ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))


def _value(one: Any) -> str:
    if getattr(one, "is_flag", False) or one.param_type_name == "argument":
        return ""
    return f"`{one.metavar or _WORDS.get(_type(one), 'TEXT')}`"


def _type(one: Any) -> str:
    """Return the name of a type by typer's descriptor, or by click's in older versions of typer."""
    described = getattr(one, "type_descriptor", None)
    return str(one.type.name if described is None else described.annotation.__name__)


def _default(one: Any) -> str:
    value = one.default
    if one.required:
        return "**required**"
    if value is None or value == "" or callable(value):
        return ""
    if isinstance(value, bool):
        if one.secondary_opts:
            return f"`{(one.opts if value else one.secondary_opts)[0]}`"
        return ""
    return f"`{value}`"


def _help(one: Any) -> str:
    told = (getattr(one, "help", None) or "").replace("|", "\\|")
    variable = getattr(one, "envvar", None)
    return f"{told} Or `{variable}` in the environment.".strip() if variable else told
