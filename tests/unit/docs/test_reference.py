"""The generated parts of the pages are what the source says now.

SERVEKIT_REWRITE=1 in the environment renews them.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

from servekit.config.json_schema import json_schema
from servekit.docs import pages
from servekit.errors import ConfigError
from servekit.event_store import KINDS
from servekit.metrics import METRICS
from servekit.protocol.messages import Status
from tests.reference import api, parts

PACKAGE = Path(__file__).parents[3] / "servekit"
GENERATED = [
    name
    for name, page in pages.list_pages().items()
    if parts.list_parts(page.path.read_text()) and name != "contributing"
]


def text(name: str) -> str:
    return pages.read_markdown(pages.find_page(name))


@pytest.mark.parametrize("name", GENERATED)
def test_a_page_is_what_the_source_says(name: str) -> None:
    path = pages.find_page(name).path
    renewed = parts.renew_page(path.read_text())
    if os.environ.get("SERVEKIT_REWRITE"):
        path.write_text(renewed)
    assert path.read_text() == renewed, "stale; run this with SERVEKIT_REWRITE=1"


def test_each_reference_has_its_page() -> None:
    found = [one for name in GENERATED for one in parts.list_parts(text_of(name))]
    assert set(found) == set(parts.PARTS)


def text_of(name: str) -> str:
    return pages.find_page(name).path.read_text()


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing generates 'metric'; there are: configuration"):
        parts.renew_page("<!-- generated: metric -->\n<!-- end -->\n")


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


@pytest.mark.parametrize("name", ["configuration", "api"])
def test_bounds_have_all_of_their_digits(name: str) -> None:
    assert not re.search(r"number, [^|]*\d\.?\d*e\+", text(name))


def commands(group: Any, name: str = "servekit") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, one in group.commands.items():
        if one.hidden:
            continue
        whole = f"{name} {part}"
        found |= commands(one, whole) if hasattr(one, "commands") else {whole: one}
    return found


def test_each_command_and_option_is_there() -> None:
    import typer

    from servekit.cli.main import app

    shown = re.split(r"^## ", text("commands"), flags=re.MULTILINE)[1:]
    sections = {part.partition("\n")[0]: part for part in shown}
    known = commands(typer.main.get_command(app))
    assert set(sections) == set(known)
    for name, command in known.items():
        for option in (one for one in command.params if not one.hidden):
            words = [*option.opts, *option.secondary_opts]
            assert option.param_type_name == "argument" or option.help, (name, words)
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


def test_each_error_code_of_a_request_is_there() -> None:
    """The codes in the source of the errors, and of the gateway."""
    sources = [PACKAGE / "errors.py", *(PACKAGE / "gateway").rglob("*.py")]
    codes = {
        code
        for path in sources
        for code in re.findall(
            r"^    code(?:: [^=]*)? = \"(\w+)\"$", path.read_text(), re.MULTILINE
        )
    }
    unsent = {"config_error", "start_error", "load_error", "forbidden_import", "wire_error"}
    shown = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text("errors"), re.MULTILINE))
    assert codes - unsent <= set(shown) and len(codes) > 30
    assert shown["client_closed"] == "499"
    found = next(one for one in text("errors").splitlines() if one.startswith("| `not_found`"))
    assert "server.batches" in found and "The path, or a model" in found


def test_each_metric_is_there() -> None:
    assert all(f"`{metric.name}`" in text("metrics") for metric in METRICS)


def test_each_field_of_the_status_is_there() -> None:
    document = text("ps-json").partition("## The document")[2].partition("## ")[0]
    assert all(f"| `{field}` |" in document for field in Status.__struct_fields__)
    assert "| `started_at` | number | Unix time, s |" in document
    assert "list of [ModelStatus](#modelstatus)" in document


def test_each_kind_of_event_that_is_recorded_is_there() -> None:
    """Calls of `journal.record_event`, and the events that the journal writes by itself."""
    calls = [
        node
        for path in (PACKAGE / "supervisor").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    places = {"journal.record_event": 0, "Event": 1}
    kinds = [
        call.args[places[name]]
        for call in calls
        if (name := ast.unparse(call.func)) in places and len(call.args) > places[name]
    ]
    recorded = {str(kind.value) for kind in kinds if isinstance(kind, ast.Constant)}
    assert recorded <= set(KINDS), recorded - set(KINDS)
    assert {"exit", "gap", "crash"} <= recorded
    assert all(f"| `{kind}` |" in text("events") for kind in KINDS)
