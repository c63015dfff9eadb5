"""`python -m tests.xllamacpp_versions [VERSION …]`: the engine contract with releases of xllamacpp.

Each release is installed by pip into a folder of its own, which is put before the environment's
packages; by default those of the last months.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = ("0.2.14", "2026.4.8672.1", "2026.6.9538", "2026.8.10566", "2026.9.11063")
TESTS = ("tests/unit/engines/contract", "-k", "llamacpp", "-q", "-p", "no:cacheprovider")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.xllamacpp_versions")
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    failed = [version for version in parser.parse_args().versions if not passes(version)]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return int(bool(failed))


def passes(version: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="servekit-xllamacpp-") as folder:
        wanted = ("--no-deps", "--target", folder, f"xllamacpp=={version}")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)
        print(f"xllamacpp {version}", flush=True)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "pytest", *TESTS]
        environment = {**os.environ, "PYTHONPATH": path}
        root = Path(__file__).parents[1]
        return subprocess.run(command, cwd=root, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
