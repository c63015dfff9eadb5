"""`python -m tests.integration.ray_nodes FOLDER FD HEAD`: a Ray cluster on this machine, by JSON.

Its answers are lines on the file descriptor FD; HEAD is what its head has otherwise, as JSON.

It has a process of its own, for what Ray leaves in one may end it long after: a test that has
nothing to do with Ray would be blamed.

    ["add", {"env_vars": {…}}]  → its number      ["kill", NUMBER] → null
    ["count", null]  → nodes that Ray takes for alive
    ["behead", null] → null: the head is gone, and with it all that Ray knew
    end of file: the end
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Ray starts several processes for each node and each worker: a busy machine takes its time.
PATIENCE_S = 180.0


def main(folder: str, more: dict[str, Any]) -> None:
    from ray.cluster_utils import Cluster

    lean: dict[str, Any] = {"object_store_memory": 80 * 2**20, "include_log_monitor": False}
    head: dict[str, Any] = {
        "num_cpus": 0,  # nothing is placed there
        "include_dashboard": False,
        "no_monitor": True,  # it grows nothing
        "temp_dir": f"{folder}/ray",
        **more,
    }
    cluster, nodes = Cluster(), []
    try:
        again(lambda: cluster.add_node(**head, **lean))
        answer(cluster.address)
        for line in sys.stdin:
            what, given = json.loads(line)
            if what == "add":
                node = {"num_cpus": 2, **lean, **given}
                nodes.append(again(lambda node=node: cluster.add_node(**node)))  # type: ignore[misc]
                answer(len(nodes) - 1)
            elif what == "kill":
                cluster.remove_node(nodes[given], allow_graceful=False)
                answer(None)
            elif what == "behead":
                lost: Any = cluster.head_node
                lost.kill_gcs_server(check_alive=False)
                lost.kill_raylet(check_alive=False)
                answer(None)
            else:
                table: Any = cluster.global_state
                answer(sum(node["Alive"] for node in table.node_table()))
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


def again(work: Callable[[], Any]) -> Any:
    """A node that Ray has given up after half a minute is started once more, twice at most."""
    for _ in range(2):
        with contextlib.suppress(Exception):
            return work()
    return work()


def answer(what: object) -> None:
    os.write(int(sys.argv[2]), json.dumps(what).encode() + b"\n")


# ---------------------------------------------------------------- of who asks


class Nodes:
    """A cluster: a head on which nothing is placed unless `head` says so, and others."""

    def __init__(self, folder: str, **head: Any) -> None:
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "tests.integration.ray_nodes", folder, str(writing)]
        command.append(json.dumps(head))
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self._path = {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(writing,),
            cwd=ROOT,
            env={**os.environ, **self._path},
            text=True,
        )
        os.close(writing)
        self._answers = os.fdopen(reading)
        self.address: str = self._answer()
        self.nodes: list[int] = []

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise ConnectionError("the cluster's process has ended")
        return json.loads(line)

    def _ask(self, *what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def add(self, more: Mapping[str, Any] | None = None, **env: str) -> int:
        """`more` is what `ray start` is told of it."""
        node: int = self._ask("add", {"env_vars": {**self._path, **env}, **(more or {})})
        if not env:
            self.nodes.append(node)
        return node

    def kill(self, node: int) -> None:
        self._ask("kill", node)

    def behead(self) -> None:
        """Kill the head, and with it all that Ray knows."""
        self._ask("behead", None)

    def count(self) -> int:
        """Of those that Ray takes for alive, the head included."""
        found: int = self._ask("count", None)
        return found

    def left(self) -> list[str]:
        """What is there of any instance: actors, and placement groups that hold something."""
        code = (
            "import json, sys, ray\n"
            "ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)\n"
            "from ray.util import list_named_actors, placement_group_table\n"
            "groups = [g for g in placement_group_table().values() if g['state'] != 'REMOVED']\n"
            "found = [a['name'] for a in list_named_actors(True)] + [g['name'] for g in groups]\n"
            "print('found:' + json.dumps(found))\n"
        )
        command = [sys.executable, "-c", code, self.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("found:")]
        assert lines, done.stderr
        found: list[str] = json.loads(lines[0].removeprefix("found:"))
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._answers.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[3]))
