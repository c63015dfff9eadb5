"""MCP servers in the configuration file, whose tools the chat page offers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from servekit.config.base_model import Section, require_form

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def check_url(value: str) -> str:
    """Return the address of an MCP server. Raises ValueError with what it must be."""
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # such as a port that is no number
        usable = False
    if not usable or re.search(r"[\s\x00-\x1f]", value):
        raise ValueError("must be an address such as https://tools.example/mcp")
    if parts.username is not None:
        raise ValueError("has a user's name or password: write them in `headers`")
    return value


def _headers(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _HEADER.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of a header")
        if not text.isascii() or not text.isprintable():
            raise ValueError(f"{name} must be printable ASCII")
    return value


def _variables(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not re.fullmatch(r"[^=\s\x00]+", name) or "\x00" in text:
            raise ValueError(f"{name!r} cannot be an environment variable")
    return value


Word = Annotated[str, require_form(r"^[^\x00]+$", "a word that is not empty")]
_OF_NAME = "letters, digits, _ and -, 32 characters at most, a letter or digit first"


class McpServerConfig(Section):
    """A server of the Model Context Protocol: a `command` or a `url` (extra `servekit[mcp]`)."""

    name: Annotated[str, require_form(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$", _OF_NAME)]
    """Shown with its tools: letters, digits, _ and -, 32 characters at most."""
    command: tuple[Word, ...] = ()
    """The words of a command that speaks on its stdin and stdout: started when it is first used. A
    program with a slash is relative to this file. It may do whatever servekit's user may."""
    env: Annotated[dict[str, str], AfterValidator(_variables)] = Field(default_factory=dict)
    """Environment variables of the command; of servekit's own it gets HOME, PATH, USER, LOGNAME,
    SHELL and TERM."""
    cwd: Path | None = None
    """The command's folder, relative to this file."""
    url: Annotated[str, AfterValidator(check_url)] | None = None
    """The address of a server over HTTP (streamable HTTP): https://tools.example/mcp."""
    headers: Annotated[dict[str, str], AfterValidator(_headers)] = Field(default_factory=dict)
    """Headers of each request to the `url`, such as `Authorization: Bearer ${TOKEN}`."""
    start_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """How long it may take to start, and to list its tools."""
    call_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How long a call may take."""
    idle_s: Annotated[float, Field(gt=0)] = 600.0
    """After this long without a call it is ended; the next use starts it again."""

    @model_validator(mode="after")
    def _has_one_source(self) -> McpServerConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("an MCP server has either a `command` or a `url`")
        if self.url is not None and (self.env or self.cwd is not None):
            raise ValueError("`env` and `cwd` are for a `command`")
        if self.command and self.headers:
            raise ValueError("`headers` are for a `url`")
        return self
