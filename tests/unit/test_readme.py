"""README: short, its commands run as they stand, its links lead somewhere; and the pins."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MOST_LINES = 200


# ---------------------------------------------------------------- the text


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_readme_shows_the_chat_page_and_top() -> None:
    assert "servekit/docs/pages/images/chat.png" in README.read_text()
    assert any(block.startswith("servekit 0.") for block in code_blocks())


def code_blocks() -> list[str]:
    return re.findall(r"```\w*\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_check_command_is_readmes() -> None:
    [command] = [block.strip() for block in code_blocks() if ".venv/bin/pytest" in block]
    last = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert last == command
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_demo_command_names_what_there_is() -> None:
    [command] = [block.strip() for block in code_blocks() if "servekit up" in block][:1]
    files = re.findall(r"[\w./-]+\.(?:txt|yaml)", command)
    assert files == ["deploy/constraints.txt", "configs/demo.yaml"]
    assert all((ROOT / name).is_file() for name in files)


@pytest.mark.parametrize("page", ["start/quickstart.md", "project/contributing.md"])
def test_the_commands_are_the_same_in_the_pages(page: str) -> None:
    text = (ROOT / "servekit" / "docs" / "pages" / page).read_text()
    commands = [block.strip() for block in code_blocks() if "-c deploy/constraints.txt" in block]
    assert len(commands) == 2
    assert commands[page.startswith("project")] in text


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (ROOT / target).exists(), target


# ---------------------------------------------------------------- the pins


def pins(name: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / "deploy" / name).read_text().splitlines()
    stated = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in stated)
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in stated)}


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins()
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["test"], *extras["lanes"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def test_with_vllm_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = pins("constraints-vllm.txt")
    wanted = [text for name in extras if name not in ("test", "lanes") for text in extras[name]]
    for text in [*project["dependencies"], *wanted]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def test_uvicorn_ends_at_the_minor_series_that_is_pinned() -> None:
    """servekit uses private parts of uvicorn, so each series has to be tried first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [text] = [one for one in project["dependencies"] if one.startswith("uvicorn")]
    pinned = Version(pins()["uvicorn"])
    allowed = Requirement(text).specifier
    assert allowed.contains(f"{pinned.major}.{pinned.minor}.99")
    assert not allowed.contains(f"{pinned.major}.{pinned.minor + 1}.0")


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-vllm.txt"])
def test_torch_is_pinned_without_its_build(name: str) -> None:
    assert Version(pins(name)["torch"]).local is None


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "Dockerfile", ".ci/run", "deploy/constraints.txt"),
        "deploy/constraints-vllm.txt",
    ],
)
def test_no_path_of_one_machine(name: str) -> None:
    assert not re.search(r"/(root|work|home/(?!servekit))\b", (ROOT / name).read_text())
