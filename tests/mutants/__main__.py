"""`python -m tests.mutants`: make each listed edit in a copy of the tree, and run its tests.

killed      a named test fails, as it must
SURVIVED    all named tests pass: nothing notices the edit
STALE       the old text does not occur exactly once, or a named test does not exist
ERROR       pytest could not run the tests: the edit breaks an import, say

First the named tests run without any edit: a test that fails anyway shows nothing. The exit code
is 1 unless every edit is killed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutants.edits import ROOT, Edit, explain_stale, read_edits

#: One edit's tests may take this long; an edit that makes them hang is found out, too.
LIMIT_S = 180.0
#: One test may: those that wait for what an edit prevents would wait for a minute. The named ones
#: take a second or two.
TEST_LIMIT_S = 20.0
#: The exit codes of pytest that say something of the tests.
PASSED, FAILED = 0, 1

#: The plugins that the tests need: to import all that are installed takes longer than the tests.
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin")

Verdict = Literal["killed", "SURVIVED", "STALE", "ERROR"]


@dataclass(frozen=True, slots=True)
class Result:
    edit: Edit
    verdict: Verdict
    took_s: float = 0.0
    detail: str = ""  # where it is not killed, or only by the time limit


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="edits with this in their name, file or promise")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    edits = [
        edit for edit in read_edits() if args.only in f"{edit.name} {edit.file} {edit.promise}"
    ]
    if not edits:
        parser.error(f"no edit has {args.only!r} in its name, file or promise")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        results = try_all(edits, Path(folder), args.jobs)
    print_table(results, time.monotonic() - began_s)
    return 0 if all(result.verdict == "killed" for result in results) else 1


def try_all(edits: Sequence[Edit], folder: Path, jobs: int) -> list[Result]:
    """Try the edits in copies of the tree below `folder`; results in the order of the edits."""
    stale = {edit.name: why for edit in edits if (why := explain_stale(edit))}
    base = folder / "base"
    copy_tree(ROOT, base)
    tests = sorted({test for edit in edits if edit.name not in stale for test in edit.tests})
    if tests:
        print(f"{len(tests)} tests without an edit", flush=True)
        code, output = run_tests(base, tests, LIMIT_S * 5)
        if code != PASSED:
            sys.exit(f"{output}\nThese tests fail without an edit: mend them first.")

    def attempt(edit: Edit) -> Result:
        if edit.name in stale:
            return Result(edit, "STALE", 0.0, stale[edit.name])
        result = try_edit(edit, base, folder / edit.name)
        print(f"{result.verdict:<8}  {result.took_s:5.1f} s  {edit.name}", flush=True)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(attempt, edits))


def try_edit(edit: Edit, base: Path, tree: Path) -> Result:
    began_s = time.monotonic()
    copy_tree(base, tree)
    try:
        edit.apply(tree)
        code, output = run_tests(tree, edit.tests, LIMIT_S)
    finally:
        shutil.rmtree(tree)
    verdict: Verdict = {PASSED: "SURVIVED", FAILED: "killed"}.get(code, "ERROR")  # type: ignore[assignment]
    detail = "" if verdict == "killed" else output.strip().rpartition("\n")[2]
    if verdict == "killed" and "Timeout (>" in output:
        detail = (
            "by the time limit"  # true of an edit that makes a test wait, and of a slow machine
        )
    return Result(edit, verdict, time.monotonic() - began_s, detail)


def copy_tree(source: Path, to: Path) -> None:
    """Copy by hard links, compiled files with them: no test writes to a file of the repository."""
    ignored = shutil.ignore_patterns(".*", "*.egg-info")
    shutil.copytree(source, to, copy_function=_link, ignore=ignored)


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # another file system
        shutil.copy2(source, to)


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run pytest in the tree; its exit code, and its output. A hang counts as a failure."""
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S:g}"]
    options += ["--lanes", "ordinary,long"]
    options += [word for plugin in PLUGINS for word in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env={
            **os.environ,
            "PYTHONPATH": str(tree),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {limit_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def print_table(results: Sequence[Result], took_s: float) -> None:
    width = max(len(result.edit.name) for result in results)
    print(f"\n{'edit':<{width}}  {'room':<11}  {'promise':<12}  {'verdict':<8}  seconds")
    for result in results:
        edit = result.edit
        print(
            f"{edit.name:<{width}}  {edit.room:<11}  {edit.promise:<12}  {result.verdict:<8}"
            f"  {result.took_s:7.1f}  {result.detail}".rstrip()
        )
    counts = Counter(result.verdict for result in results)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"\n{len(results)} edits in {took_s:.0f} s: {told}")


if __name__ == "__main__":
    sys.exit(main())
