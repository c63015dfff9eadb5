"""The command of the walk; see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.first_use.commands import walk_commands
from tests.first_use.mistakes import walk_mistakes
from tests.first_use.pages import walk_pages
from tests.first_use.report import Report

WALKS: Mapping[str, Callable[[Path, Report], None]] = {
    "mistakes": walk_mistakes,
    "commands": walk_commands,
    "pages": walk_pages,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Walk a first day with servekit.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the report")
    parser.add_argument("--only", default=",".join(WALKS), help=f"of {', '.join(WALKS)}")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    report = Report(options.output)
    try:
        for name in options.only.split(","):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                WALKS[name](Path(folder), report)
    finally:
        print(f"{len(report.findings)} steps, {len(report.wrong)} not as wished: {report.write()}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
