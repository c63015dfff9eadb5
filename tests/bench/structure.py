"""Figures of how easily a reader finds the way in a package: `python -m tests.bench.structure`.

Prints one Markdown table: this package beside other packages, which are read where they are
installed. The figures give a direction; no test holds them.

    python -m tests.bench.structure [--others uvicorn starlette mosec] [--names]
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, quantiles

#: First words after which the subject of a docstring's sentence is missing.
_OPENINGS = {
    *("what", "whether", "who", "whom", "whose", "how", "where", "why", "which", "when"),
    *("it", "its", "they", "their", "them", "those", "these", "this", "that", "he", "she"),
    *("one", "ones", "of", "as", "all", "nobody", "nothing", "none", "some", "others", "another"),
}
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Figures:
    """Counts over all modules of a package."""

    name: str
    files: int = 0
    lines: int = 0
    file_lines: list[int] = field(default_factory=list)
    in_folder: Counter[Path] = field(default_factory=Counter)
    functions: list[str] = field(default_factory=list)
    complexities: list[int] = field(default_factory=list)
    #: Places of the public functions, methods and classes, by name.
    public: dict[str, list[str]] = field(default_factory=dict)
    docstrings: int = 0
    bad_openings: int = 0
    #: Of public classes and functions, methods included: those there are, and with a docstring.
    documentable: int = 0
    documented: int = 0
    function_lines: list[int] = field(default_factory=list)
    typed: int = 0  # functions whose result has a type
    #: Members of protocols and of other classes, by class.
    protocols: dict[str, set[str]] = field(default_factory=dict)
    classes: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield each figure's name and value."""
        named = [name for name in self.functions if not name.startswith("__")]
        private = sum(name.startswith("_") for name in named)
        one_word = sum("_" not in name.strip("_") for name in named)
        yield "files; lines", f"{self.files}; {self.lines:,}"
        yield (
            "lines of a file: median; longest",
            f"{_median(self.file_lines)}; {max(self.file_lines)}",
        )
        yield "folders", str(len(self.in_folder))
        yield "modules in a folder, most", str(max(self.in_folder.values()))
        yield "functions", f"{len(self.functions):,}"
        yield "one-word names of functions", _share(one_word, len(named))
        yield "private functions", _share(private, len(named))
        yield "public names with five or more definitions", str(len(self.shared_names()))
        yield (
            "docstrings that open with a pronoun or a question word",
            _share(self.bad_openings, self.docstrings),
        )
        yield (
            "public classes and functions with a docstring",
            _share(self.documented, self.documentable),
        )
        yield "functions whose result has a type", _share(self.typed, len(self.functions))
        yield (
            "lines of a function: median; p95",
            f"{_median(self.function_lines)}; {quantiles(self.function_lines, n=20)[-1]:.0f}",
        )
        complexities = sorted(self.complexities)
        p95 = quantiles(complexities, n=20)[-1] if len(complexities) > 1 else 0
        yield (
            "complexity: mean; p95; most",
            f"{mean(complexities):.1f}; {p95:.0f}; {complexities[-1]}",
        )
        single = sum(self._implementations(members) == 1 for members in self.protocols.values())
        yield "protocols; with one implementation", f"{len(self.protocols)}; {single}"

    def shared_names(self) -> dict[str, list[str]]:
        """Return the public names that five or more definitions share, with their places."""
        found = [(name, places) for name, places in self.public.items() if len(places) >= 5]
        return dict(sorted(found, key=lambda one: -len(one[1])))

    def _implementations(self, members: set[str]) -> int:
        """Count the classes that have all members of a protocol."""
        return sum(members <= self._all_members(name, set()) for name in self.classes)

    def _all_members(self, name: str, seen: set[str]) -> set[str]:
        """Return the members of a class, inherited ones included; `seen` are classes below it."""
        if name in seen or name not in self.classes:
            return set()
        above = [self._all_members(base, seen | {name}) for base in self.bases[name]]
        return self.classes[name].union(*above)


def read_package(name: str, folder: Path) -> Figures:
    """Read all modules below `folder`; raises SyntaxError for a module that does not parse."""
    figures = Figures(name)
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        figures.files += 1
        figures.file_lines.append(len(text.splitlines()))
        figures.lines += figures.file_lines[-1]
        figures.in_folder[path.parent] += path.name != "__init__.py"
        _read_module(ast.parse(text, str(path)), str(path.relative_to(folder)), figures)
    return figures


def _read_module(tree: ast.Module, place: str, figures: Figures) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
            typed = {"Protocol", "typing.Protocol"} & {
                ast.unparse(base).partition("[")[0] for base in node.bases
            }
            kind = figures.protocols if typed else figures.classes
            kind[node.name] = set(_members(node))
            figures.bases[node.name] = bases
        if isinstance(node, _Function):
            figures.functions.append(node.name)
            figures.typed += node.returns is not None
            figures.function_lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
            figures.complexities.append(_complexity(node))
        if isinstance(node, _Function | ast.ClassDef) and not node.name.startswith("_"):
            figures.public.setdefault(node.name, []).append(f"{place}:{node.lineno}")
            figures.documentable += 1
            figures.documented += ast.get_docstring(node) is not None
        if isinstance(node, _Function | ast.ClassDef | ast.Module):
            said = ast.get_docstring(node)
            if said:
                figures.docstrings += 1
                figures.bad_openings += said.split()[0].strip("`.,:;()").lower() in _OPENINGS


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the methods and attributes that a class defines, also in its methods."""
    for part in ast.walk(node):
        if isinstance(part, _Function):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr


def _complexity(function: _Function) -> int:
    """McCabe's cyclomatic complexity; functions inside are counted on their own, too."""
    branches = sum(isinstance(node, _BRANCHES) for node in ast.walk(function))
    more = sum(len(node.values) - 1 for node in ast.walk(function) if isinstance(node, ast.BoolOp))
    clauses = sum(
        1 + len(node.ifs) for node in ast.walk(function) if isinstance(node, ast.comprehension)
    )
    cases = sum(len(node.cases) for node in ast.walk(function) if isinstance(node, ast.Match))
    return 1 + branches + more + clauses + cases


def _median(numbers: list[int]) -> int:
    return sorted(numbers)[len(numbers) // 2]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.structure")
    parser.add_argument("--others", nargs="*", default=["uvicorn", "starlette", "mosec"])
    parser.add_argument("--names", action="store_true", help="list our shared names instead")
    arguments = parser.parse_args()
    found = [read_package("servekit", Path(__file__).parents[2] / "servekit")]
    if arguments.names:
        for name, places in found[0].shared_names().items():
            print(f"{name} ({len(places)}): {', '.join(places)}")
        return 0
    for name in arguments.others:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(read_package(name, Path(spec.origin).parent))
    tables = [dict(figures.rows()) for figures in found]
    print(f"| | {' | '.join(figures.name for figures in found)} |")
    print("|---" * (len(found) + 1) + "|")
    for row in tables[0]:
        print(f"| {row} | {' | '.join(table[row] for table in tables)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
