"""The listed edits, read from `edits/*.toml`: one file for each room of the package.

[[edit]]
name = "keys-part-of-digest"          # unique, for --only
promise = "keys"                      # the promise that the edit breaks
file = "servekit/gateway/keys.py"     # from the repository's root
old = 'digest[:32]'                   # occurs exactly once in the file
new = 'digest[:4]'
tests = ["tests/unit/gateway/test_keys.py::test_whole_digest"]  # at least one must fail
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("edits")


@dataclass(frozen=True, slots=True)
class Edit:
    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The sub-package, or the module directly in the package."""
        return Path(self.file).with_suffix("").parts[1]

    def apply(self, root: Path) -> None:
        """Write the edited file below `root`. The file there may be a hard link: replace it."""
        path = root / self.file
        text = path.read_text().replace(self.old, self.new)
        path.unlink()
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


def read_edits(folder: Path = FOLDER) -> list[Edit]:
    """All listed edits. Raises ValueError where a name is used twice."""
    edits = [
        Edit(**{**entry, "tests": tuple(entry["tests"])})
        for file in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(file.read_text())["edit"]
    ]
    names = [edit.name for edit in edits]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"edits have the same name: {', '.join(sorted(twice))}")
    return edits


def explain_stale(edit: Edit, root: Path = ROOT) -> str:
    """Why the edit does not fit the tree below `root`; "" if it does."""
    path = root / edit.file
    if not path.is_file():
        return f"there is no {edit.file}"
    if (count := path.read_text().count(edit.old)) != 1:
        return (
            f"the old text occurs {count} times in {edit.file}: correct it in tests/mutants/edits"
        )
    if edit.new == edit.old:
        return "the new text is the old one"
    if not edit.tests:
        return "no test is named"
    return next((f"there is no {test}" for test in edit.tests if not _exists(test, root)), "")


def _exists(test: str, root: Path) -> bool:
    """Whether the file defines a function of that name; the parameters are not looked at."""
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    if not names or not path.is_file():
        return False
    return (
        re.search(rf"^\s*(async )?def {re.escape(names[-1])}\(", path.read_text(), re.M) is not None
    )
