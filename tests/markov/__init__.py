"""A package of somebody else's that brings servekit an engine; see `servekit docs write-an-engine`.

It is no part of servekit: its modules are imported as `markov_engine` and `markov_kind`, from where
`install` has put them.
"""

from __future__ import annotations

from pathlib import Path

from tests.plugin_site import install_plugin

HERE = Path(__file__).parent
#: What its engine learns from, and what comes of it: each line ends an answer.
CORPUS = "".join(
    f"The {animal} {verb} over the {what}.\n"
    for animal in ("quick brown fox", "lazy dog", "small cat")
    for verb in ("jumps", "leaps", "looks")
    for what in ("lazy dog", "fence", "sea", "old garden wall")
)


def install(site: Path) -> Path:
    """Put it into a folder for PYTHONPATH, as pip would."""
    return install_plugin(HERE, site)


def write_corpus(folder: Path) -> Path:
    """A model: a folder with a text in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text(CORPUS)
    return folder
