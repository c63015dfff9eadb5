"""The reference: all of it is there, and no link in it is dead."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from servekit.config.json_schema import json_schema
from servekit.docs import api, pages
from servekit.errors import ConfigError
from servekit.gateway import manual
from servekit.metrics import METRICS


@cache
def text(name: str) -> str:
    return pages.markdown(name)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if "href" in found else []


def test_the_gateway_has_all_of_them() -> None:
    assert set(manual.PAGES) == set(pages.PAGES)


@pytest.mark.parametrize("name", pages.PAGES)
def test_no_link_is_dead(name: str) -> None:
    page = Page(pages.html(name, ".html"))
    assert len(page.ids) == len(set(page.ids))
    known = {f"#{one}" for one in page.ids} | {f"{one}.html" for one in pages.PAGES}
    assert set(page.links) <= known
    anchors = re.findall(r"\]\(#([^)]*)\)", text(name))
    assert set(anchors) <= set(page.ids)


def test_each_key_of_the_file_is_there() -> None:
    schema = json_schema()
    shown = set(re.findall(r"^\| `([^`]*)` \|", text("configuration"), re.MULTILINE))
    for section in (schema, *schema["$defs"].values()):
        for key in section.get("properties", {}):
            assert any(one == key or one.endswith(f".{key}") for one in shown), key
    assert {
        "server.tls.key",
        "models[].options.kv_cache_bytes",
        "models[].adapters[].path",
    } <= shown
    assert text("configuration").count("**required**") >= 4


def commands(group: Any, name: str = "servekit") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, one in group.commands.items():
        whole = f"{name} {part}"
        found |= commands(one, whole) if hasattr(one, "commands") else {whole: one}
    return found


def test_each_command_and_option_is_there() -> None:
    import typer

    from servekit.cli import app

    shown = re.split(r"^## ", text("commands"), flags=re.MULTILINE)[1:]
    sections = {part.partition("\n")[0]: part for part in shown}
    known = commands(typer.main.get_command(app))
    assert set(sections) == set(known)
    for name, command in known.items():
        for option in command.params:
            words = [*option.opts, *option.secondary_opts]
            for word in words if option.param_type_name == "option" else ():
                assert f"`{word}`" in sections[name], (name, word)
    assert "`SERVEKIT_RUN_DIR`" in sections["servekit ps"]
    assert "| `PATH` |  | **required** |" in sections["servekit adapter add"]


def test_each_route_is_there() -> None:
    described = api.document()
    for path, methods in described["paths"].items():
        for method in methods:
            assert f"\n### {method.upper()} {path}\n" in text("api")
    fields = sum(
        len(one.get("properties", ())) for one in described["components"]["schemas"].values()
    )
    assert text("api").count("\n| `") >= fields


def test_each_metric_is_there() -> None:
    assert all(f"`{metric.name}`" in text("metrics") for metric in METRICS)


def test_what_descriptions_say_is_no_markup() -> None:
    assert "<script" not in "".join(pages.html(name) for name in pages.PAGES)


def test_a_page_there_is_not() -> None:
    with pytest.raises(ConfigError, match="there are: configuration, commands, api, metrics"):
        pages.html("nowhere")


def test_the_command_writes_them(tmp_path: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "servekit", "docs", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("-o", str(tmp_path / "new" / "docs")).returncode == 0
    for name in pages.PAGES:
        assert (tmp_path / "new" / "docs" / f"{name}.md").read_text() == text(name)
    wrong = run("confguration")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("\n") == 1
    (tmp_path / "file").write_text("")
    assert "cannot write" in run("-o", str(tmp_path / "file" / "x")).stderr
