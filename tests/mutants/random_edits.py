"""Random edits of modules, and how many of them the unit tests notice.

    pip install pytest-cov
    python -m tests.mutants.random_edits servekit/gateway/routing --tests tests/unit/gateway/routing

An edit turns a comparison or condition around, changes a number, leaves out a call or an
assignment, or returns None. It is made in a copy of the tree, and the tests that run its line are
tried, which a run of all of `--tests` has found out before.

killed      one of them fails
SURVIVED    all pass: a hole in the tests, or an edit that changes nothing that matters
UNCOVERED   no test runs the line; also constants and defaults, which an import runs

Unlike the edits of `python -m tests.mutants`, these are nobody's choice: a sample says how closely
a part is tested, and each survivor is to be looked at. The exit code says nothing of them.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.__main__ import FAILED, LIMIT_S, PASSED, PLUGINS, copy_tree, run_tests
from tests.mutants.edits import ROOT

_OPPOSITES: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
#: Tests that are tried for an edit, of those that run its line.
MOST_TESTS = 40


@dataclass(frozen=True, slots=True)
class RandomEdit:
    """One edit: bytes `start` to `end` of a file, a path within the tree, become `new`."""

    path: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, tree: Path) -> None:
        file = tree / self.path
        source = file.read_bytes()
        file.unlink()  # it is a hard link
        file.write_bytes(source[: self.start] + self.new.encode() + source[self.end :])

    def describe(self) -> str:
        old = (ROOT / self.path).read_bytes()[self.start : self.end].decode()
        return f"{self.path}:{self.line} {' '.join(old.split())[:60]!r} → {self.new[:60]!r}"


def find_edits(path: Path, root: Path = ROOT) -> Iterator[RandomEdit]:
    """Yield all edits of a module below `root`."""
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    tree = ast.parse(source)
    passed_over = {id(inner) for node in ast.walk(tree) for inner in _passed_over(node)}
    for node in ast.walk(tree):
        if id(node) in passed_over:
            continue
        for place, new in _edits_of(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            yield RandomEdit(str(path.relative_to(root)), place.lineno, start, end, new)


def _passed_over(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is no behaviour: annotations, assertions and lines of the log.

    And texts with values in them, which Python before 3.12 does not place.
    """
    if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
        yield from ast.walk(node.annotation)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
        yield from ast.walk(node.returns)
    elif isinstance(node, ast.Assert | ast.JoinedStr) or (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("log.")
    ):
        yield from ast.walk(node)


def _edits_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the part of a node that is replaced, and its replacement."""
    match node:
        case ast.Compare(left, [kind], [right]) if type(kind) in _OPPOSITES:
            yield node, f"{ast.unparse(left)} {_OPPOSITES[type(kind)]} {ast.unparse(right)}"
        case ast.BoolOp(kind, values):
            joint = " or " if isinstance(kind, ast.And) else " and "
            yield node, f"({joint.join(f'({ast.unparse(one)})' for one in values)})"
        case ast.UnaryOp(ast.Not(), operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Constant(bool() as value):
            yield node, repr(not value)
        case ast.Constant(int() | float() as value):
            yield node, repr(value + 1)
        case ast.Expr(ast.Call() | ast.Await()):
            yield node, "pass"
        case ast.Assign([ast.Attribute()]):
            yield node, "pass"
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield value, "None"
        case ast.AugAssign(target, ast.Add(), value):
            yield node, f"{ast.unparse(target)} -= {ast.unparse(value)}"


def learn_tests(tree: Path, folders: Sequence[str]) -> dict[tuple[str, int], list[str]]:
    """Run the tests once; return by file and line which of them run it."""
    from coverage import CoverageData

    options = ["--cov=servekit", "--cov-context=test", "--cov-report=", "-p", "pytest_cov.plugin"]
    options += [word for plugin in PLUGINS for word in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", *options, *folders]
    env = {"PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tree, env={**os.environ, **env}, check=True)
    data = CoverageData(str(tree / ".coverage"))
    data.read()
    return {
        (str(Path(file).relative_to(tree)), line): _names(contexts)
        for file in data.measured_files()
        for line, contexts in data.contexts_by_lineno(file).items()
    }


def _names(contexts: Sequence[str]) -> list[str]:
    """Return the tests without their parameters, of contexts such as "a.py::test_b[1]|run"."""
    return sorted({one.rpartition("|")[0].partition("[")[0] for one in contexts} - {""})


def try_edit(edit: RandomEdit, tests: Sequence[str], base: Path, tree: Path) -> str:
    if not tests:
        return "UNCOVERED"
    if len(tests) > MOST_TESTS:
        tests = random.Random(edit.line).sample(tests, MOST_TESTS)
    copy_tree(base, tree)
    try:
        edit.apply(tree)
        code, _ = run_tests(tree, tests, LIMIT_S)
    finally:
        shutil.rmtree(tree)
    return {PASSED: "SURVIVED", FAILED: "killed"}.get(code, "killed")  # it cannot be imported


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants.random_edits")
    parser.add_argument("sources", nargs="+", type=Path, metavar="FILE-OR-FOLDER")
    parser.add_argument("--tests", nargs="+", required=True, metavar="FILE-OR-FOLDER")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    files = [file for one in args.sources for file in (sorted(one.rglob("*.py")) or [one])]
    edits = [edit for file in files for edit in find_edits(file.absolute())]
    random.Random(args.seed).shuffle(edits)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        base = Path(folder) / "base"
        copy_tree(ROOT, base)
        ran_by = learn_tests(base, args.tests)
        for edit in edits[: args.count]:
            tests = ran_by.get((edit.path, edit.line), [])
            verdict = try_edit(edit, tests, base, Path(folder) / "edited")
            counts[verdict] += 1
            print(f"{verdict:<9}  {edit.describe()}", flush=True)
    print(f"{counts['killed']} of {counts.total()} killed: {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
