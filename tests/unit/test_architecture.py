"""The shape of the package: who may import whom, and what no process may load.

The rules are read off the source of every module, nested imports included, so that an import
inside a function is no way around them; what a process really loads is asked of fresh interpreters.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from servekit.config.engines.options import ENGINE_OPTIONS
from servekit.engines import ENGINES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "servekit"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES} - {PACKAGE})

#: What stands at the top of the repository, hidden files apart.
TOP_LEVEL = {"servekit", "configs", "tests", "deploy"} | {
    "Dockerfile",
    "pyproject.toml",
    "README.md",
    "LICENSE",
}

#: Which parts of the package a part may import. A part is a folder or a module of the package.
_BASE = {"errors", "units", "sse", "system", "protocol"}
MAY_IMPORT = {
    "__init__": set(),
    "__main__": {"cli", "system"},
    "errors": set(),
    "units": set(),
    "sse": set(),
    "metrics": set(),
    "sanitize": set(),
    "log_events": set(),
    "logging_config": {"log_events", "sanitize"},
    # files that the supervisor or its children write, and that clients read
    "event_store": set(),
    "log_files": set(),
    "request_log": set(),
    "usage_store": set(),
    # the names that the author of an engine imports
    "plugin": {"errors", "protocol", "config", "engines"},
    # vLLM's source files, which `check` and the worker read without importing it
    "vllm_source": set(),
    "system": {"errors", "units", "protocol"},
    "protocol": {"errors"},
    "model_metadata": {"errors"},
    "config": {"errors", "units", "model_metadata", "system", "vllm_source"},
    "engines": _BASE | {"model_metadata", "logging_config", "vllm_source"},
    "worker": _BASE | {"config", "logging_config", "engines"},
    "gateway": _BASE
    | {"config", "logging_config", "log_events", "metrics", "log_files", "request_log"},
    "supervisor": _BASE
    | {
        "config",
        "logging_config",
        "model_metadata",
        "metrics",
        "event_store",
        "ray",
        "request_log",
        "usage_store",
    },
    "ray": _BASE | {"config", "logging_config", "supervisor"},
    "chaos": _BASE | {"config", "supervisor", "bench"},
    "bench": {"errors", "units", "sse", "sanitize", "system", "protocol"},
    "diagnostics": {"errors", "units", "system", "config", "protocol", "supervisor"},
    "cli": _BASE
    | {"config", "supervisor", "ray", "chaos", "bench", "diagnostics", "docs", "logging_config"}
    | {
        "metrics",
        "event_store",
        "log_events",
        "log_files",
        "sanitize",
        "model_metadata",
        "vllm_source",
        "request_log",
        "usage_store",
    },
    "docs": {"errors"},
}
#: The modules of engines that the worker may import; the registry names each engine itself.
ENGINES_FRONT = {
    "servekit.engines",
    "servekit.engines.api.base",
    "servekit.engines.api.load_phases",
    "servekit.engines.api.text_engine",
}
ONLY_IN_ENGINES = {
    "torch",
    "transformers",
    "peft",
    "vllm",
    "llama_cpp",
    "xllamacpp",
    "accelerate",
} | {
    *("ctranslate2", "faster_whisper", "onnxruntime"),
}
ONLY_IN_GATEWAY = {"fastapi", "starlette", "uvicorn", "gradio", "prometheus_client"}
NOWHERE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of all imports of a module, wherever they stand in it."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((a.lineno, str(a.value)) for a in node.args if isinstance(a, ast.Constant))


def offenders(forbidden: set[str], allowed_in: str = "") -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        if part(path) != allowed_in
        for line, name in imports(path)
        if name.split(".")[0] in forbidden
    ]


# ---------------------------------------------------------------- the source


def test_every_part_has_its_rule() -> None:
    assert {part(path) for path in MODULES} <= set(MAY_IMPORT)


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_parts_import_only_what_they_may(name: str) -> None:
    allowed = MAY_IMPORT[name] | {name}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for path in MODULES
        if part(path) == name
        for line, target in imports(path)
        if target.startswith("servekit.") and not _may(target, allowed)
    ]
    assert not wrong, "\n".join(wrong)


def _may(target: str, allowed: set[str]) -> bool:
    return target == "servekit.__version__" or target.split(".")[1] in allowed


def test_the_worker_knows_no_engine_by_its_class() -> None:
    fronts = tuple(f"{front}." for front in ENGINES_FRONT)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        if part(path) == "worker"
        for line, name in imports(path)
        if name.startswith("servekit.engines") and name not in ENGINES_FRONT
        if not name.startswith(fronts)
        or (PACKAGE.parent / (name.replace(".", "/") + ".py")).is_file()
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_and_its_like_live_in_engines_only() -> None:
    assert not offenders(ONLY_IN_ENGINES, "engines")


def test_only_the_process_that_speaks_to_ray_imports_it() -> None:
    outside = [line for line in offenders({"ray"}) if not line.startswith("servekit/ray/process/")]
    assert not outside


def test_the_web_lives_in_the_gateway_only() -> None:
    assert not offenders(ONLY_IN_GATEWAY, "gateway")


def test_nothing_is_ever_pickled() -> None:
    """multiprocessing pickles too: its queues, pipes and processes."""
    found = offenders(NOWHERE | {"multiprocessing", "concurrent.futures.process"})
    # takes vLLM's process as multiprocessing gives it to one that it spawns
    assert {one.partition(":")[0] for one in found} == {"servekit/engines/vllm/core/core_host.py"}


def test_only_the_command_line_prints() -> None:
    prints = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        if part(path) != "cli"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "print"
    ]
    assert not prints


def test_environments_are_passed_and_never_edited() -> None:
    """`os.environ[...] = ` in a parent reaches children that were never meant."""
    edits = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in MODULES
        if part(path) in {"supervisor", "cli", "gateway", "config", "protocol", "ray", "system"}
        for node in ast.walk(tree(path))
        if _edits_environment(node)
    ]
    # options of the user's pager, in a process that starts nothing else
    edits.remove("servekit/cli/docs.py: os.environ.setdefault('LESS', '-FRX')")
    assert not edits


def _edits_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign | ast.Delete):
        return any(ast.unparse(target).startswith("os.environ[") for target in node.targets)
    calls = {"os.environ.update", "os.environ.setdefault", "os.environ.pop", "os.putenv"}
    return isinstance(node, ast.Call) and ast.unparse(node.func) in calls


def test_modules_say_what_they_are() -> None:
    assert not [path for path in MODULES if not ast.get_docstring(tree(path))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_folders_say_who_may_import_them(folder: Path) -> None:
    said = " ".join((ast.get_docstring(tree(folder / "__init__.py")) or "").split())
    assert "import" in said, "who may import from this folder?"
    if (
        rule := re.search(r"(Only|No other part)((?:(?!\. )[^:])*?) may import from here", said)
    ) is None:
        return
    allowed = {f"servekit.{name}" for name in re.findall(r"`([\w.]+)`", rule[2])}
    own = module_name(folder)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        if not path.is_relative_to(folder) and not _is_below(module_name(path), allowed)
        for line, target in imports(path)
        if _is_below(target, {own})
    ]
    assert not wrong, f"{rule[0]!r}, but there is {wrong}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _is_below(name: str, packages: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def test_every_engine_has_options_and_the_reverse() -> None:
    assert set(ENGINES) == set(ENGINE_OPTIONS)


def test_the_top_level_holds_what_it_should() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    top = {name.split("/")[0] for name in listed}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL


# ---------------------------------------------------------------- fresh interpreters


def loaded(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


HEAVY = {
    "ray",
    "torch",
    "transformers",
    "fastapi",
    "gradio",
    "uvicorn",
    "peft",
    "numpy",
    "pandas",
} | {"prometheus_client"}


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import servekit.supervisor.supervisor, servekit.cli.main", HEAVY),
        ("import servekit.config.load", HEAVY | {"asyncio", "rich"}),
        ("import servekit.cli.main", HEAVY | {"pydantic", "yaml", "msgspec", "asyncio"}),
        (
            "import servekit.gateway.server",
            {"torch", "transformers", "peft", "servekit.config.schema"},
        ),
        ("import servekit.worker.worker", {"torch", "transformers", "fastapi", "gradio"}),
        ("import servekit.engines", {"torch", "transformers", "numpy"}),
        ("import servekit", HEAVY | {"pydantic", "msgspec", "typer"}),
    ],
)
def test_what_a_process_never_loads(statement: str, forbidden: set[str]) -> None:
    assert not loaded(statement) & forbidden
