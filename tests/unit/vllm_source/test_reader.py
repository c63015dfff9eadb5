"""Source files are read without importing them: packages with all kinds of definitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.vllm_source.reader import SourceTree

FILES = {
    "pkg/__init__.py": "from .inner import Child as Kid\nraise RuntimeError('imported')\n",
    "pkg/inner/__init__.py": "from pkg.inner.base import Base\nfrom .child import Child\n",
    "pkg/inner/base.py": (
        "class Base:\n"
        "    LIMIT = 1\n"
        "    def __init__(self, size, *, dtype=None):\n"
        "        self.np = size\n"
        "        other.gpu = dtype\n"
        "        self.pool, (self.first, _) = make()\n"
    ),
    "pkg/inner/child.py": (
        "import enum\nfrom pkg.inner import Base\n"
        "class Child(Base, enum.Enum):\n"
        "    field: int\n"
        "    async def step(self): ...\n"
    ),
    "pkg/where.py": (
        "try:\n    from gone import Thing\nexcept ImportError:\n    class Thing:\n        a = 1\n"
        "from pkg.where import Loop\n"
        "def act(first, /, second, *, third): ...\n"
    ),
    "pkg/broken.py": "def (",
}


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return SourceTree(tmp_path)


def test_members_are_found_through_imports_and_bases(tree: SourceTree) -> None:
    found = {"field", "step", "LIMIT", "__init__", "size", "dtype", "np", "pool", "first", "self"}
    assert tree.members_of("pkg", "Kid") == found
    assert tree.members_of("pkg.inner", "Child") == found


def test_members_of_functions_are_parameters(tree: SourceTree) -> None:
    assert tree.members_of("pkg.where", "act") == {"first", "second", "third"}


def test_a_class_may_stand_in_a_block(tree: SourceTree) -> None:
    assert tree.members_of("pkg.where", "Thing") == {"a"}


@pytest.mark.parametrize(
    ("module", "name", "sentence"),
    [
        ("pkg.inner", "Gone", "there is no such class or function"),
        ("pkg.where", "Loop", "there is no such class or function"),
        ("pkg.gone", "Child", "there is no such module"),
        ("pkg.broken", "Child", "there is no such module"),
        ("elsewhere", "Child", "there is no such module"),
    ],
)
def test_missing_names_are_told(tree: SourceTree, module: str, name: str, sentence: str) -> None:
    with pytest.raises(LookupError, match=sentence):
        tree.members_of(module, name)


def test_fields_are_those_of_a_dataclass_in_order(tmp_path: Path) -> None:
    (tmp_path / "args.py").write_text(
        "class Args:\n    b: int = 1\n    a: str\n    many: ClassVar[int] = 0\n    c = 3\n"
    )
    assert SourceTree(tmp_path).fields_of("args", "Args") == ["b", "a"]


NEEDS = """
class Fields(Base):
    b: int
    a: int = 1
    many: ClassVar[int]

class Base:
    c: str
    d: str = ""

class Made(Base):
    def __init__(self, size, kind=None, *, name, other=1): ...

def act(first, second=2, *, third, fourth=None): ...
"""


@pytest.mark.parametrize(
    ("name", "needs"),
    [("Fields", {"b", "c"}), ("Made", {"size", "name"}), ("act", {"first", "third"})],
)
def test_needs_are_all_without_a_default(tmp_path: Path, name: str, needs: set[str]) -> None:
    (tmp_path / "args.py").write_text(NEEDS)
    assert SourceTree(tmp_path).needs_of("args", name) == needs
