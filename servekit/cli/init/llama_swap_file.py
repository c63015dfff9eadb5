"""A reader of llama-swap's configuration file: macros, variables, and commands in words.

Source: llama-swap's docs/configuration.md, config-schema.json and internal/config (2026-08). A
macro `${name}` is replaced in any value. Macros of a model go before those of the file, later ones
before earlier ones, `${MODEL_ID}` last. `${env.NAME}` is a variable of the environment; `${PORT}` a
port that llama-swap chooses, and `${PID}` its server's process.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servekit.config.yaml.file_reader import read_document
from servekit.config.yaml.nodes import plain_value
from servekit.errors import ConfigError

PORT = "${PORT}"
_ENV = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_MACRO = re.compile(r"\$\{([A-Za-z0-9_-]+)\}")
_TEXT, _LIST, _NUMBER = (str, "text"), (list, "a list"), (int, "a whole number")
_TYPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("proxy", "checkEndpoint", "useModelName", "name", "description"), _TEXT),
    **dict.fromkeys(("aliases", "env"), _LIST),
    **dict.fromkeys(("ttl", "concurrencyLimit", "healthCheckTimeout"), _NUMBER),
}
#: Macros that have no value before a start.
_LATE = {"PORT", "PID"}


@dataclass(slots=True)
class SwapFile:
    """The file's values, as they are written, and the macros for them."""

    path: Path
    data: Mapping[str, Any]
    environ: Mapping[str, str]
    used: set[str] = field(default_factory=set)  # variables whose values are now in models

    @property
    def models(self) -> dict[str, Mapping[str, Any]]:
        """The models' sections by id, without macros."""
        return {name: self._expand_model(name, told) for name, told in self._sections.items()}

    @property
    def _sections(self) -> dict[str, dict[str, Any]]:
        models = self.data.get("models")
        if not isinstance(models, dict) or not models:
            raise ConfigError(f"{self.path}: has no models; is it llama-swap's file?")
        for name, told in models.items():
            if not isinstance(told, dict) or not isinstance(told.get("cmd"), str):
                raise ConfigError(f"{self.path}: models.{name} has no `cmd`, so nothing starts it")
        return models

    def _expand_model(self, name: str, told: dict[str, Any]) -> Mapping[str, Any]:
        macros = {"MODEL_ID": name, **_mapping(self.data, "macros"), **_mapping(told, "macros")}
        own = {key: value for key, value in told.items() if key != "macros"}
        own["cmd"] = _strip_comments(own["cmd"])  # a macro in a comment is none
        expanded = self._expand(own, macros)
        assert isinstance(expanded, dict)
        self._refuse_unknown(expanded, f"models.{name}")
        self._check_types(expanded, f"models.{name}")
        return expanded

    def _check_types(self, told: Mapping[str, Any], place: str) -> None:
        for key, (kind, what) in _TYPES.items():
            if key in told and not isinstance(told[key], kind):
                raise ConfigError(f"{self.path}: {place}.{key} has to be {what}")

    def expand(self, value: Any) -> Any:
        """Replace the file's macros in a value that belongs to no model; variables stay."""
        return _replace_macros(value, _mapping(self.data, "macros"))

    def _expand(self, value: Any, macros: Mapping[str, Any]) -> Any:
        return self._replace_variables(_replace_macros(value, macros))

    def _replace_variables(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._replace_variables(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._replace_variables(item) for item in value]
        return _ENV.sub(self._read_variable, value) if isinstance(value, str) else value

    def _read_variable(self, found: re.Match[str]) -> str:
        name = found[1]
        if name not in self.environ:
            raise ConfigError(
                f"{self.path}: the variable {name} is not set, and llama-swap would not start"
                f" without it; set it and try again"
            )
        self.used.add(name)
        return self.environ[name]

    def _refuse_unknown(self, value: Any, place: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                self._refuse_unknown(item, f"{place}.{key}")
        elif isinstance(value, str):
            for name in _MACRO.findall(value):
                if name not in _LATE:
                    raise ConfigError(f"{self.path}: {place}: there is no macro ${{{name}}}")


def read_file(path: Path, environ: Mapping[str, str]) -> SwapFile:
    """Read a file of llama-swap. Raises ConfigError."""
    data = plain_value(read_document(path))
    assert isinstance(data, dict)
    return SwapFile(path, data, environ)


def split_command(text: str) -> list[str]:
    """Split a command as llama-swap does: lines that begin with # are comments.

    Raises ValueError.
    """
    lines = []
    for line in _strip_comments(text).splitlines():
        ends = line.strip().endswith("\\")
        lines.append(line.strip().removesuffix("\\") + " " if ends else line)
    words = shlex.split("\n".join(lines))
    if not words:
        raise ValueError("it is empty")
    return words


def variable_of(text: object) -> str:
    """Return the variable that a value is, as ${env.NAME}; "" for other values."""
    found = _ENV.fullmatch(text) if isinstance(text, str) else None
    return found[1] if found else ""


def _strip_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.strip().startswith("#"))


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def _replace_macros(value: Any, macros: Mapping[str, Any]) -> Any:
    for name, content in reversed(list(macros.items())):
        value = _replace_macro(value, f"${{{name}}}", content)
    return value


def _replace_macro(value: Any, macro: str, content: Any) -> Any:
    """Replace a macro in all texts of a value; a text that is the macro becomes its content."""
    if isinstance(value, dict):
        return {
            key.replace(macro, _format(content)): _replace_macro(item, macro, content)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_replace_macro(item, macro, content) for item in value]
    if value == macro:
        return content
    return value.replace(macro, _format(content)) if isinstance(value, str) else value


def _format(content: object) -> str:
    if isinstance(content, bool):
        return str(content).lower()
    if isinstance(content, float) and content.is_integer():
        return str(int(content))
    return str(content)
