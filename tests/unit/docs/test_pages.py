"""The pages: all listed, all links alive, nothing that only one machine has."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from servekit.docs import pages
from servekit.docs.pages import make_anchor
from servekit.errors import ConfigError

ROOT = Path(__file__).parents[3]
NAMES = list(pages.list_pages())
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {make_anchor(one) for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_the_index_lists_every_page_once() -> None:
    listed = [page.path for page in pages.list_pages().values()]
    assert sorted(listed) == sorted(pages.FOLDER.rglob("*.md"))
    text = (pages.FOLDER / "index.md").read_text()
    assert len(re.findall(r"^- ", text, re.MULTILINE)) == len(listed) - 1


@pytest.mark.parametrize("name", NAMES)
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    page = pages.find_page(name)
    for target in LINK.findall(without_code(page.path.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.path.parent / path).resolve() if path else page.path
        assert file.is_file() and file.is_relative_to(pages.FOLDER), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("name", NAMES)
def test_a_page_begins_with_its_title(name: str) -> None:
    page = pages.find_page(name)
    lines = page.path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert name == pages.INDEX or lines[0] == f"# {page.title}"
    assert not re.search(r"/(root|work|home/(?!servekit))\b", page.path.read_text())
    assert "TODO" not in page.path.read_text()


def test_every_file_that_a_page_names_is_there() -> None:
    """Paths of the repository, as `deploy/…`, are told as code and not linked."""
    for page in pages.list_pages().values():
        text = re.sub(r"^```.*?^```$", "", page.path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for path in re.findall(r"`((?:deploy|configs|tests|servekit)/[\w./-]+)`", text):
            assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), (page.name, path)


def test_every_test_that_a_page_names_is_there() -> None:
    modules = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for page in pages.list_pages().values():
        assert set(re.findall(r"`(test_\w+)`", page.path.read_text())) <= modules, page.name


def test_images_are_small() -> None:
    assert all(path.stat().st_size < 200_000 for path in pages.FOLDER.glob("images/*"))


def test_a_page_is_found_by_name_and_by_path() -> None:
    assert pages.find_page("gpus") == pages.find_page("guides/gpus.md")
    with pytest.raises(ConfigError, match=r"there is no page 'gpsu'; did you mean 'gpus'\?"):
        pages.find_page("gpsu")
    with pytest.raises(ConfigError, match="`servekit docs` lists the pages"):
        pages.find_page("qqqqq")


def test_marks_of_generated_parts_are_not_shown() -> None:
    assert "<!--" in pages.find_page("metrics").path.read_text()
    assert "<!--" not in pages.read_markdown(pages.find_page("metrics"))


def test_a_terminal_gets_the_names_of_linked_pages() -> None:
    shown = pages.read_for_terminal(pages.find_page("swapping"))
    assert "(→ `speed-on-gpus`)" in shown
    assert ".md)" not in shown
    assert "*(picture: The chat page" in pages.read_for_terminal(pages.find_page("chat-page"))


def test_code_is_shown_as_it_stands() -> None:
    text = pages.replace_outside_code(re.compile("a"), "b", "a\n```\na\n```\na\n")
    assert text == "b\n```\na\n```\nb\n"


# ---------------------------------------------------------------- what pages say is so


def test_every_folder_of_the_package_is_in_the_guide_for_contributors() -> None:
    text = pages.find_page("contributing").path.read_text()
    folders = {path.parent.name for path in (ROOT / "servekit").glob("*/__init__.py")}
    told = text.partition("## Where a change goes")[2].partition("## Style")[0]
    rows = re.findall(r"^\| (`.+?`) \|", told, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == folders


def test_the_version_is_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version}\n" in pages.find_page("changelog").path.read_text()


def test_the_commands_are_those_of_the_command_line() -> None:
    from servekit.cli.main import app

    text = pages.find_page("command-line").path.read_text()
    shown = set(re.findall(r"^\| `servekit (\w[\w-]*)", text, re.MULTILINE))
    commands = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback and not command.hidden
    }
    assert shown == commands | {group.name for group in app.registered_groups}


async def test_the_endpoints_are_those_of_the_gateway() -> None:
    from servekit.gateway.app import Application
    from servekit.gateway.routing.router import Router

    text = pages.find_page("http").path.read_text()
    shown = set(re.findall(r"^\| `(?:GET|POST|DELETE) (/[\w/.{}]*)`", text, re.MULTILINE))
    application = Application(Router("test"), 10**6, ui=False, legacy=True)
    served = set(application.rest.openapi()["paths"])
    assert shown - {"/ui", "/docs"} == {re.sub(r":path", "", path) for path in served}


def test_the_example_of_an_engine_is_as_short_as_is_said() -> None:
    example = ROOT / "tests" / "markov" / "markov_engine.py"
    text = " ".join(pages.find_page("write-an-engine").path.read_text().split())
    assert "whose engine has less than 160 lines" in text
    assert len(example.read_text().splitlines()) < 160
