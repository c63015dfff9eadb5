"""A package of somebody else's that brings servekit an engine; see README, "Write an engine".

It is no part of servekit: its modules are imported as `markov_engine` and `markov_kind`, from where
`install` has put them.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
#: What its engine learns from, and what comes of it: each line ends an answer.
CORPUS = "".join(
    f"The {animal} {verb} over the {what}.\n"
    for animal in ("quick brown fox", "lazy dog", "small cat")
    for verb in ("jumps", "leaps", "looks")
    for what in ("lazy dog", "fence", "sea", "old garden wall")
)


def install(site: Path) -> Path:
    """Put it into a folder for PYTHONPATH, as pip would: its modules, and its metadata."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(line for group in groups for line in group))
    for module in ("markov_engine.py", "markov_kind.py"):
        shutil.copy(HERE / module, site)
    return site


def write_corpus(folder: Path) -> Path:
    """A model: a folder with a text in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text(CORPUS)
    return folder
