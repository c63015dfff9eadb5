"""`transformers serve`, installed from the package index into an environment of its own; and what
other peers need for that, too."""

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


def installed(folder: Path, *more: str) -> Path:
    """The peer's interpreter, in an environment at `folder` that is made if it is not there.

    Of the same versions as ours, torch's CPU build included; with `more` packages.
    """
    if not (folder / "bin" / "transformers").exists():
        install(folder, "transformers[serving]", *more, "-c", str(CONSTRAINTS))
    return folder / "bin" / "python"


def install(folder: Path, *wanted: str) -> None:
    """Make an environment at `folder`, and have pip install into it."""
    print(f"installing {wanted[0]} into {folder} …", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
    subprocess.run([*pip, *wanted], check=True, timeout=INSTALL_S)


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
            self.rest()

    def rest(self) -> None:
        """Be stopped until the next turn."""
        os.killpg(self.pid, signal.SIGSTOP)


@contextlib.contextmanager
def serve(
    python: Path,
    model: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
) -> Iterator[Peer]:
    """`transformers serve` with `model` loaded, on a free port; killed with all it started."""
    port = free_port()
    run = (str(python), "-m", "transformers.cli.transformers")  # also where no script is installed
    command = (*run, "serve", str(model), "--port", str(port))
    options = ("--host", "127.0.0.1", "--device", device, "--dtype", dtype, *arguments)
    with started([*command, *options], log, {**environ, "HF_HUB_OFFLINE": "1"}) as process:
        url = f"http://127.0.0.1:{port}"
        await_answer(process, f"{url}/health", log)
        yield Peer(url, process.pid)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    log: Path,
    environ: Mapping[str, str] | None = None,
    *,
    talks: bool = False,
    pass_fds: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is killed in the end with all of it.

    One that `talks` does so over stdin and stdout; else it has none, and both are in the log.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else output,
            stderr=output,
            env=environ,
            start_new_session=True,
            pass_fds=pass_fds,
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def await_answer(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a server that is starting answers 200 there."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text(errors='replace')}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
