"""The chain of imports, read off the stack while modules are being imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.system.python.import_chain import importers, is_machinery, modules_under_way

LOOK = "from servekit.system.python import import_chain as _look\n"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_importing_modules_come_outermost_first_with_their_lines(modules: Path) -> None:
    (modules / "chain_outer.py").write_text("\n\nimport chain_middle\n")
    (modules / "chain_middle.py").write_text("def load():\n    import chain_inner\n\nload()\n")
    (modules / "chain_inner.py").write_text(f"{LOOK}steps = _look.importers()\n")
    importlib.import_module("chain_outer")
    steps = sys.modules["chain_inner"].steps
    assert steps[-2:] == [
        ("chain_outer", str(modules / "chain_outer.py"), 3),
        ("chain_middle", str(modules / "chain_middle.py"), 2),
    ]
    assert steps[-3][:2] == (__name__, __file__), "who called importlib.import_module"


def test_the_module_under_way_is_the_last(modules: Path) -> None:
    (modules / "chain_outer.py").write_text("import chain_inner\n")
    (modules / "chain_inner.py").write_text(
        f"{LOOK}def ask():\n    return _look.modules_under_way()\n\nnames = ask()\n"
    )
    importlib.import_module("chain_outer")
    names = sys.modules["chain_inner"].names
    assert names[-3:] == [__name__, "chain_outer", "chain_inner"]


def test_a_function_of_another_module_is_no_import_of_its_own(modules: Path) -> None:
    """It is not under way: the module that calls it is."""
    (modules / "chain_helper.py").write_text(
        f"{LOOK}def ask():\n    return _look.modules_under_way()\n"
    )
    (modules / "chain_outer.py").write_text("import chain_helper\nnames = chain_helper.ask()\n")
    importlib.import_module("chain_outer")
    assert sys.modules["chain_outer"].names[-2:] == [__name__, "chain_outer"]


def test_a_frame_may_be_given_instead_of_ones_own(modules: Path) -> None:
    (modules / "chain_outer.py").write_text("import chain_inner\n")
    (modules / "chain_inner.py").write_text(
        f"import sys\n{LOOK}def ask(frame):\n"
        "    return _look.importers(frame), _look.modules_under_way(frame)\n"
        "steps, names = ask(sys._getframe())\n"
    )
    importlib.import_module("chain_outer")
    inner = sys.modules["chain_inner"]
    assert [step[0] for step in inner.steps][-1] == "chain_outer"
    assert inner.names[-2:] == ["chain_outer", "chain_inner"]


def test_outside_any_import_there_is_no_chain() -> None:
    in_this_test = sys._getframe()
    before = importers(in_this_test)
    assert (__name__ in [step[0] for step in before]) is False
    assert importers() == before and modules_under_way() == modules_under_way(in_this_test)


@pytest.mark.parametrize(
    ("file", "machinery"),
    [
        ("<frozen importlib._bootstrap>", True),
        ("<frozen importlib._bootstrap_external>", True),
        ("/usr/lib/python3.11/importlib/__init__.py", True),
        ("/usr/lib/python3.11/importlib/metadata/__init__.py", False),
        ("/home/ann/importer.py", False),
        ("<string>", False),
    ],
)
def test_frames_of_the_import_machinery_are_known_by_their_file(file: str, machinery: bool) -> None:
    assert is_machinery(file) is machinery
