"""Our Triton kernels without a GPU, by Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def interpret(code: str, folder: Path) -> None:
    """Run Python code that calls our kernels on the CPU; it fails if the code does.

    Triton comes with torch for CUDA only: elsewhere it is installed below `folder`, in a minute.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    if find_spec("triton") is None:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder))
        subprocess.run([*pip, "triton"], check=True, timeout=600)
        environment["PYTHONPATH"] = str(folder)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=200)
