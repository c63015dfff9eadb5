"""A Ray cluster of several nodes, all of them on this machine, for as long as a test takes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.system import procfs
from tests.integration import ray_growing
from tests.integration.ray_nodes import Nodes


@contextlib.contextmanager
def running(*, grows: bool = False) -> Iterator[Nodes]:
    """A head on which nothing is placed. Raises ConnectionError if Ray does not start it.

    `grows`: as `ray_growing` has it, with a node to be had by who asks for it.
    """
    with contextlib.ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        folder = Path(tempfile.mkdtemp(prefix="ray"))  # sockets' paths have to be short
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "ray").mkdir()
        # what Ray notes of the newest cluster of the machine is not to be shared with others
        patch.setenv("RAY_TMPDIR", str(folder))
        for name, value in (ray_growing.ENVIRON if grows else {}).items():
            patch.setenv(name, value)
        made = Nodes(str(folder), **(ray_growing.head(folder) if grows else {}))
        try:
            yield made
        finally:
            made.end()
            ray_growing.end(folder)


def raylet_of(pid: int) -> int:
    """The process of Ray's node that a worker descends from."""
    # whole: what is cut has lost its folders, and Ray says all of its settings on that line
    while "raylet/raylet" not in procfs.command_line(pid, 2**20):
        found = procfs.read_process(pid)
        assert found is not None and found.parent > 0, "no node of Ray above it"
        pid = found.parent
    return pid
