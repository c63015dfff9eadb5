"""`python -m tests.lowest`: the tests with the lowest versions that pyproject.toml admits.

uv finds the lowest version of each package that pyproject.toml names, and pip installs them into an
environment of their own; the unit tests and a start of configs/demo.yaml run there. Style is not
checked.

torch keeps the version that is installed here: its lowest one would be a build for CUDA.

--venv PATH    kept and used again; by default a temporary one
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from servekit.engines.model_files.package_index import Settings
from tests.interpreters import ROOT, make_environment, run_tests


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lowest")
    parser.add_argument("--venv", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lowest-") as folder:
        venv = (args.venv or Path(folder) / "venv").absolute()
        if not (venv / "bin" / "pytest").exists():
            versions = resolve(Path(folder))
            pip = (str(make_environment(sys.executable, venv)), "-m", "pip", "install", "-q")
            subprocess.run([*pip, "--no-deps", "-r", str(versions)], check=True)
            subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
        passed = run_tests(venv)
    print("all passed" if passed else "failed")
    return int(not passed)


def resolve(folder: Path) -> Path:
    """Write the lowest versions into a file of requirements, with the user's package indexes."""
    settings = Settings.from_environ(os.environ)
    torch = folder / "torch.txt"
    torch.write_text(f"torch=={metadata.version('torch')}\n")
    found = folder / "lowest.txt"
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "-q", "pyproject.toml"),
        *("--extra", "test", "--resolution", "lowest-direct", "--override", str(torch)),
        *("--no-config", "--no-annotate", "--index-strategy", "unsafe-best-match"),
        *("-o", str(found)),
    ]
    sources = {
        "UV_DEFAULT_INDEX": settings.indexes[0],
        "UV_INDEX": " ".join(settings.indexes[1:]),
        "UV_FIND_LINKS": ",".join(settings.find_links),
    }
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | sources)
    return found


if __name__ == "__main__":
    sys.exit(main())
