"""`transformers serve`, installed from the package index into an environment of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

CONSTRAINTS = Path(__file__).parents[2] / "deploy" / "constraints.txt"
#: Both were measured to be good here, and neither default fits a small machine.
BATCHING = ("--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512")
INSTALL_S = 1200.0
START_S = 240.0


def installed(folder: Path) -> Path:
    """The peer's interpreter, in an environment at `folder` that is made if it is not there.

    Of the same versions as ours, torch's CPU build included.
    """
    python = folder / "bin" / "python"
    if not (folder / "bin" / "transformers").exists():
        print(f"installing transformers[serving] into {folder} …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        install = (str(python), "-m", "pip", "install", "--quiet", "transformers[serving]")
        subprocess.run([*install, "-c", str(CONSTRAINTS)], check=True, timeout=INSTALL_S)
    return python


@dataclass(frozen=True, slots=True)
class Peer:
    """A running server. It is stopped (SIGSTOP) while another has its turn: it may spin."""

    url: str
    pid: int

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        os.killpg(self.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.pid, signal.SIGSTOP)


@contextlib.contextmanager
def serve(
    python: Path, model: Path, arguments: Sequence[str], environ: Mapping[str, str], log: Path
) -> Iterator[Peer]:
    """`transformers serve` with `model` loaded, on a free port; killed with all it started."""
    port = free_port()
    command = (str(python.with_name("transformers")), "serve", str(model), "--port", str(port))
    options = ("--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32", *arguments)
    with started([*command, *options], log, {**environ, "HF_HUB_OFFLINE": "1"}) as process:
        url = f"http://127.0.0.1:{port}"
        _await_health(process, url, log)
        yield Peer(url, process.pid)


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is killed in the end with all of it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"transformers serve did not start:\n{log.read_text(errors='replace')}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
