"""The host of vLLM's core, with processes that are started in it instead of a core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servekit.system import procfs
from tests.polling import poll

#: `fork_host` needs a process without threads, and a function that a fresh interpreter can import.
PROGRAM = """
import json, os, sys, threading
from multiprocessing.connection import wait
from servekit.engines.vllm.core import core_host

def tell(path):
    told = {"pid": os.getpid(), "color": os.environ.get("COLOR"), "old": os.environ.get("OLD")}
    with open(path, "w") as file:
        json.dump(told, file)
    sys.exit(7)

def hold():
    threading.Event().wait()

if __name__ == "__main__":
    print("{}", flush=True) if sys.argv[1] == "none" else core_host.fork_host()
    if sys.argv[1] == "idle":
        print(json.dumps({"host": core_host._host.pid}), flush=True)
        hold()
    host = core_host._host
    if sys.argv[1] == "dead":
        os.kill(host.pid, 9)
        os.waitid(os.P_PID, host.pid, os.WEXITED | os.WNOWAIT)
    os.environ["COLOR"] = "red"
    os.environ.pop("OLD")
    context = core_host._HostContext()
    processes = [context.Process(target=tell, args=(path,)) for path in sys.argv[2:]]
    for process in processes:
        process.start()
    for process in processes:
        wait([process.sentinel])
        process.join()
    print(json.dumps({"host": host and host.pid, "codes": [p.exitcode for p in processes]}))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "starts_a_core.py"
    path.write_text(PROGRAM)
    return path


def run(program: Path, how: str, *outputs: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    command = [sys.executable, str(program), how, *map(str, outputs)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[4]), "OLD": "yes"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return told, [json.loads(path.read_text()) for path in outputs]


def test_one_process_runs_in_the_host_and_the_next_is_spawned(
    program: Path, tmp_path: Path
) -> None:
    told, (first, second) = run(program, "forked", tmp_path / "first", tmp_path / "second")
    assert told["codes"] == [7, 7]
    assert first["pid"] == told["host"] != second["pid"]
    assert (first["color"], first["old"]) == (second["color"], second["old"]) == ("red", None)


@pytest.mark.parametrize("how", ["none", "dead"])
def test_without_a_host_it_is_spawned(program: Path, tmp_path: Path, how: str) -> None:
    told, [only] = run(program, how, tmp_path / "only")
    assert told["codes"] == [7]
    assert only["pid"] != told["host"]


def test_a_host_that_waits_ends_with_its_worker(program: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(program), "idle"],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[4])},
    ) as worker:
        assert worker.stdout is not None
        host = procfs.read_process(json.loads(worker.stdout.readline())["host"])
        assert host is not None
        worker.kill()
    poll("it has ended", lambda: not procfs.is_alive(host.pid, host.started), 10)
