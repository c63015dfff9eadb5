"""MCP servers in a configuration file, and what is said about those that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.config.engines.installed import Machine
from servekit.config.load import load_here
from servekit.config.schema import Config
from servekit.errors import ConfigError

HERE = Machine(has_gpu=False, has=lambda module: True)


def load(folder: Path, *servers: dict[str, Any], machine: Machine = HERE) -> Config:
    path = folder / "a.yaml"
    models = [{"name": "m", "engine": "echo"}]
    path.write_text(json.dumps({"models": models, "server": {"mcp": servers}}))
    return load_here(path, machine)[0]


def test_paths_and_secrets_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    program = tmp_path / "tool"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    local, remote = load(
        tmp_path,
        {"name": "a", "command": ["./tool", "-v"], "cwd": ".", "env": {"KEY": "${TOKEN}"}},
        {"name": "b", "url": "https://b.example/mcp", "headers": {"X-Key": "k ${TOKEN}"}},
    ).server.mcp
    assert local.command == (str(program), "-v") and local.cwd == tmp_path
    assert local.env == {"KEY": "s3cret"} and remote.headers == {"X-Key": "k s3cret"}


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        ([{"name": "a"}], "server.mcp[0]: an MCP server has either a `command` or a `url`"),
        ([{"name": "a", "command": ["true"], "url": "http://a.example"}], "either a `command`"),
        ([{"name": "a", "command": ["no-such-tool"]}], "no program no-such-tool in PATH"),
        ([{"name": "a", "command": ["./none"]}], "command: there is no program /"),
        ([{"name": "a", "command": ["true"], "cwd": "none"}], "none is not a folder"),
        ([{"name": "a", "command": ["true"]}] * 2, "server.mcp[1].name: two MCP servers are named"),
        ([{"name": "a b", "command": ["true"]}], "server.mcp[0].name"),
        ([{"name": "a", "url": "ftp://a.example"}], "an address such as https://"),
        ([{"name": "a", "url": "https://a.example:port/"}], "an address such as https://"),
        ([{"name": "a", "url": "https://u:s3cret@a.example/"}], "write them in `headers`"),
        ([{"name": "a", "url": "http://a.example", "headers": {"a b": "x"}}], "name of a header"),
        ([{"name": "a", "url": "http://a.example", "headers": {"a": "x\ny"}}], "printable ASCII"),
        ([{"name": "a", "url": "http://a.example", "env": {"A": "x"}}], "are for a `command`"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, servers: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *servers)
    assert said in error.value.message
    assert "s3cret" not in error.value.message


def test_without_the_package_pips_line_is_said(tmp_path: Path) -> None:
    bare = Machine(has_gpu=False, has=lambda module: module != "mcp")
    with pytest.raises(ConfigError, match=r"pip install 'servekit\[mcp\]'"):
        load(tmp_path, {"name": "a", "command": ["true"]}, machine=bare)


def test_servers_without_pages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    server = {"ui": False, "mcp": [{"name": "a", "command": ["true"]}]}
    path.write_text(json.dumps({"models": [{"name": "m", "engine": "echo"}], "server": server}))
    with pytest.raises(ConfigError, match="only the pages use MCP servers"):
        load_here(path, HERE)
