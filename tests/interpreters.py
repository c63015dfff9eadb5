"""`python -m tests.interpreters PYTHON...`: the tests with other interpreters.

    python -m tests.interpreters /opt/python3.13/bin/python3.13 python3.12

For each it makes an environment with the versions of deploy/constraints.txt, and runs the unit
tests and a start of configs/demo.yaml in it. Style is not checked: ruff and mypy read the source,
whichever interpreter runs them.

--venv PATH    of one interpreter: kept and used again; by default a temporary one
--no-torch     where pip finds no build of torch for it: all but the engines that need it

The tests skip whatever has no package for that interpreter; pytest's summary has the reasons.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
STYLE = ("tests/unit/test_style.py",)
#: Tests which import torch themselves, or what needs it.
OF_TORCH = (
    *("tests/unit/engines", "tests/unit/docs", "tests/unit/test_plugin.py"),
    *(
        "tests/unit/diagnostics/cuda_trace/test_trace.py",
        "tests/unit/system/python/test_import_guard.py",
    ),
    "tests/unit/gateway/generation/test_generation.py",
    "tests/unit/gateway/tool_parsing/grammars/test_tool_grammar.py",
    *(
        "tests/unit/worker/test_calling.py",
        "tests/unit/worker/preparation/test_request_preparation.py",
    ),
)
NEED_TORCH = ("torch", "accelerate", "peft")
DEMO = ("tests/integration/test_demo.py", "--lanes", "models")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interpreters")
    parser.add_argument("python", nargs="+", help="interpreters, by path or by name")
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    if args.venv and len(args.python) > 1:
        parser.error("--venv is for one interpreter")
    failed = []
    for python in args.python:
        with tempfile.TemporaryDirectory(prefix="interpreters-") as folder:
            venv = (args.venv or Path(folder) / "venv").absolute()
            if not (venv / "bin" / "pytest").exists():
                install(make_environment(python, venv), torch=not args.no_torch)
            if not run_tests(venv, torch=not args.no_torch):
                failed.append(python)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return int(bool(failed))


def make_environment(python: str, venv: Path) -> Path:
    """Make a virtual environment; return its interpreter."""
    subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
    return venv / "bin" / "python"


def install(python: Path, *, torch: bool) -> None:
    """Install servekit from this checkout, and what its tests need, in the tested versions."""
    pip = (str(python), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS))
    if torch:
        subprocess.run([*pip, "-e", f"{ROOT}[test]"], check=True)
        return
    wanted = [
        line
        for line in metadata.requires("servekit") or ()
        if Requirement(line).name not in NEED_TORCH and _is_for_tests(Requirement(line))
    ]
    subprocess.run([*pip, *(line.partition(";")[0] for line in wanted)], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)


def _is_for_tests(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": "test"})


def run_tests(venv: Path, *, torch: bool = True, leave_out: Sequence[str] = STYLE) -> bool:
    """Run the unit tests, and start configs/demo.yaml; whether both passed."""
    left_out = [*leave_out, *(() if torch else OF_TORCH)]
    parts = [("tests/unit", *(f"--ignore={path}" for path in left_out))]
    parts += [DEMO] if torch else []
    passed = [_run_pytest(venv, part) for part in parts]
    return all(passed)


def _run_pytest(venv: Path, part: Sequence[str]) -> bool:
    print(f"== {venv}: pytest {' '.join(part)}", flush=True)
    command = [str(venv / "bin" / "python"), "-m", "pytest", "-q", "-n", "2", *part]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
