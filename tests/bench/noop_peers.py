"""A request that does nothing, through servekit and through other frameworks that have a worker.

    python -m tests.bench.noop_peers [--connections 1 16 64] [--rounds 5] [--venv DIR]
        [--peers mosec litserve]

Each has one process that listens and one that works, as its own documentation starts it, and gives
the same answer; Mosec once without and once with batches of 64. Beside them stands the bare uvicorn
application, which has no worker at all. Both are installed from the package index.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.bench.contest import Plan, bare, contest, ratios, remarks
from tests.bench.figures import conditions
from tests.bench.load import Order, Result
from tests.bench.noop import BODY, PATH
from tests.bench.peers import free_port, started
from tests.bench.table import Figure, markdown, spread
from tests.integration.instance import Instance, echo

PEERS = ("mosec", "litserve")
#: By name, how many requests it may take at once.
MOSECS = (("mosec", 1), ("mosec in batches", 64))
START_S, INSTALL_S = 60.0, 900.0

MOSEC = """
import json, sys
from mosec import Server, Worker

ANSWER = json.loads({answer!r})

class Echo(Worker):
    def forward(self, data):
        return [ANSWER for _ in data] if {batch} > 1 else ANSWER

if __name__ == "__main__":
    server = Server()
    server.append_worker(Echo, num=1, max_batch_size={batch}, max_wait_time={wait_ms})
    server.run()
"""
LITSERVE = """
import json, sys
import litserve

ANSWER = json.loads({answer!r})

class Echo(litserve.LitAPI):
    def setup(self, device):
        pass
    def decode_request(self, request):
        return request
    def predict(self, request):
        return ANSWER
    def encode_response(self, output):
        return output

if __name__ == "__main__":
    server = litserve.LitServer(Echo(), accelerator="cpu", workers_per_device=1)
    port = int(sys.argv[1])
    server.run(host="127.0.0.1", port=port, log_level="error", generate_client_file=False)
"""


def installed(folder: Path, peers: Sequence[str]) -> Path:
    """The peers' interpreter, in an environment at `folder` that is made if it is not there."""
    python = folder / "bin" / "python"
    if not (folder / "bin" / "mosec-done").exists():
        print(f"installing {' and '.join(peers)} into {folder} …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        install = (str(python), "-m", "pip", "install", "--quiet", *peers, "uvloop", "httptools")
        subprocess.run(install, check=True, timeout=INSTALL_S)
        (folder / "bin" / "mosec-done").touch()
    return python


@contextlib.contextmanager
def peer(folder: Path, name: str, script: str, path: str, command: Sequence[str]) -> Iterator[int]:
    """One of them, started; its port."""
    source, log = folder / f"serve_{name}.py", folder / f"{name}.log"
    source.write_text(script)
    port = free_port()
    told = [word.format(source=source, port=port) for word in command]
    with started(told, log) as process:
        _await(process, f"http://127.0.0.1:{port}{path}", log)
        yield port


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.post(url, content=BODY, timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{log.stem} did not start:\n{log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def contestants(
    folder: Path, python: Path, peers: Sequence[str]
) -> Iterator[dict[str, tuple[int, str]]]:
    """Name → port and path of everybody, all of whom wait while another is asked."""
    mosec = (str(python), "{source}", "--address", "127.0.0.1", "--port", "{port}")
    quiet = (*mosec, "--log-level", "error")
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(Instance.up(folder, [echo("echo")]))
        status = instance.until_settled()
        answer = httpx.post(status.url + PATH, content=BODY).raise_for_status().text
        found = {"servekit": (urlsplit(status.url).port or 0, PATH)}
        for name, batch in MOSECS if "mosec" in peers else ():
            script = MOSEC.format(answer=answer, batch=batch, wait_ms=1 if batch > 1 else 0)
            made = peer(folder, name.replace(" ", "_"), script, "/inference", quiet)
            found[name] = stack.enter_context(made), "/inference"
        if "litserve" in peers:
            script = LITSERVE.replace("{answer!r}", repr(answer))
            made = peer(folder, "litserve", script, "/predict", (str(python), "{source}", "{port}"))
            found["litserve"] = stack.enter_context(made), "/predict"
        found["bare uvicorn"] = stack.enter_context(bare(answer))[0], "/whole"
        yield found


def _rows(ports: dict[str, tuple[int, str]], connections: int, plan: Plan) -> Iterator[Figure]:
    orders = {
        name: Order(port, path, BODY, connections, (os.getpid(),))
        for name, (port, path) in ports.items()
    }
    outcomes = contest(orders, plan)
    ours = outcomes["servekit"]
    for name, theirs in outcomes.items():
        if name == "servekit":
            continue
        by_round = ratios(ours, theirs, _rate)
        ratio = statistics.median(by_round)
        aimed = name == "mosec"
        yield Figure(
            f"no-op, {connections} connections, servekit against {name}",
            f"{ratio:.2f}; by round {spread(by_round)}",
            "> 1" if aimed else "",
            ratio > 1 if aimed else None,
            f"{ours.median(_rate):,.0f}/s against {theirs.median(_rate):,.0f}/s; "
            f"{remarks({name: theirs})}",
        )


def _rate(result: Result) -> float:
    return result.answers_per_s


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.noop_peers", description=__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--venv", type=Path, help="the peers' environment, kept; else a fresh one")
    options = parser.parse_args(arguments)
    plan = Plan(options.rounds, options.seconds)
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as name:
        folder = Path(name)
        python = installed(options.venv or folder / "venv", options.peers)
        with contestants(folder, python, options.peers) as ports:
            rows = [row for n in options.connections for row in _rows(ports, n, plan)]
    print(f"{conditions()}\n\n{markdown(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
