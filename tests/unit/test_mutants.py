"""The listed edits of `python -m tests.mutants` fit the tree, and are enough of them."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.edits import ROOT, Edit, explain_stale, read_edits
from tests.mutants.random_edits import find_edits

EDITS = read_edits()
ONE = Edit("a", "health", "servekit/a.py", "x = 1", "x = 2", ("tests/test_a.py::test_it",))


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_no_edit_is_stale(edit: Edit) -> None:
    """A file that has moved, or a line that has changed, takes its edit with it."""
    assert explain_stale(edit) == ""


def test_there_are_enough_edits_in_every_room_and_of_every_promise() -> None:
    assert len(EDITS) >= 100
    rooms = {edit.room for edit in EDITS}
    promises = {edit.promise for edit in EDITS}
    assert rooms >= {"config", "engines", "gateway", "protocol", "ray", "supervisor", "worker"}
    assert promises >= {
        *("adapters", "autoscale", "cancel", "cli", "continuation", "drain", "health", "keys"),
        *("limits", "parsers", "pinning", "quarantine", "quotas", "reload", "retry", "sampling"),
        *("swap", "TLS"),
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "servekit/__pycache__").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "servekit/a.py").write_text("x = 1\ny = 3\nz = y\n")
    (tmp_path / "servekit/__pycache__/a.cpython-311.pyc").write_bytes(b"old")
    (tmp_path / "tests/test_a.py").write_text("async def test_it(): ...\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"tests": ("tests/test_a.py::test_it[1-x]",)}, ""),
        ({"file": "servekit/b.py"}, "there is no servekit/b.py"),
        (
            {"old": "x = 4"},
            "the old text occurs 0 times in servekit/a.py: correct it in tests/mutants/edits",
        ),
        (
            {"old": "y"},
            "the old text occurs 2 times in servekit/a.py: correct it in tests/mutants/edits",
        ),
        ({"new": "x = 1"}, "the new text is the old one"),
        ({"tests": ()}, "no test is named"),
        ({"tests": ("tests/test_a.py::test_i",)}, "there is no tests/test_a.py::test_i"),
        ({"tests": ("tests/test_b.py::test_it",)}, "there is no tests/test_b.py::test_it"),
        ({"tests": ("tests/test_a.py",)}, "there is no tests/test_a.py"),
    ],
)
def test_a_stale_edit_is_explained(tree: Path, changes: dict[str, object], said: str) -> None:
    assert explain_stale(replace(ONE, **changes), tree) == said  # type: ignore[arg-type]


def test_an_edit_leaves_the_file_that_it_was_linked_to(tree: Path) -> None:
    (tree / "original").hardlink_to(tree / ONE.file)
    ONE.apply(tree)
    assert (tree / ONE.file).read_text() == "x = 2\ny = 3\nz = y\n"
    assert (tree / "original").read_text() == "x = 1\ny = 3\nz = y\n"
    assert not list((tree / "servekit/__pycache__").iterdir()), "its bytecode would be taken for it"


def test_names_are_given_once(tmp_path: Path) -> None:
    (entry,) = (ROOT / "tests/mutants/edits/protocol.toml").read_text().split("\n\n")[:1]
    (tmp_path / "a.toml").write_text(f"{entry}\n\n{entry}\n")
    with pytest.raises(ValueError, match="the same name"):
        read_edits(tmp_path)


def test_every_random_edit_is_another_program() -> None:
    path = ROOT / "servekit" / "gateway" / "routing" / "throughput.py"
    source = path.read_bytes()
    edits = list(find_edits(path))
    assert len(edits) > 10
    for edit in edits:
        changed = source[: edit.start] + edit.new.encode() + source[edit.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), edit.describe()


def test_annotations_assertions_and_log_lines_are_not_edited(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "def f(a: int = 1, *, b: Literal[2]) -> Literal[3]:\n"
        "    assert a == 4\n"
        "    log.warning('five', six=6)\n"
        "    c: Literal[7] = b\n"
        "    return f'{c + 8}'\n"
    )
    assert sorted(edit.new for edit in find_edits(file, tmp_path)) == ["2", "None"]
