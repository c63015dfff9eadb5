"""`python -m tests.integration.ray_nodes FOLDER`: a Ray cluster on this machine, by lines of JSON.

It has a process of its own, for what Ray leaves in one may end it long after: a test that has
nothing to do with Ray would be blamed.

    ["add", {"env_vars": {…}}]  → its number      ["kill", NUMBER] → null      end of file: the end
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def main(folder: str) -> None:
    from ray.cluster_utils import Cluster

    lean: dict[str, Any] = {"object_store_memory": 80 * 2**20, "include_log_monitor": False}
    head: dict[str, Any] = {
        "num_cpus": 0,  # nothing is placed there
        "include_dashboard": False,
        "no_monitor": True,  # it grows nothing
        "temp_dir": f"{folder}/ray",
    }
    cluster, nodes = Cluster(), []
    try:
        again(lambda: cluster.add_node(**head, **lean))
        answer(cluster.address)
        for line in sys.stdin:
            what, given = json.loads(line)
            if what == "add":
                more = {"num_cpus": 2, **lean, **given}
                nodes.append(again(lambda more=more: cluster.add_node(**more)))  # type: ignore[misc]
                answer(len(nodes) - 1)
            else:
                cluster.remove_node(nodes[given], allow_graceful=False)
                answer(None)
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


if __name__ == "__main__":
    main(sys.argv[1])
