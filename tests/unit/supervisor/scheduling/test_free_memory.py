"""Whether the memory that a worker needs is there."""

from __future__ import annotations

import pytest

from servekit.supervisor.scheduling.gpu_admission import SLACK_BYTES, GpuSnapshot, obstacle
from servekit.system.gpu.gpus import Gpu

GIB = 2**30
GPU = Gpu(0, "GPU-0", "H200", 100 * GIB, 100 * GIB)


def said(
    free: float,
    need: float,
    others: dict[str, tuple[int, int | None]] | None = None,
    dead: int = 0,
    strangers: dict[int, int] | None = None,
) -> str:
    claims = {
        name: (claim * GIB, None if held is None else held * GIB)
        for name, (claim, held) in (others or {}).items()
    }
    held = {pid: size * GIB for pid, size in (strangers or {}).items()}
    scene = GpuSnapshot(GPU, int(free * GIB), int(need * GIB), claims, dead * GIB, held)
    return obstacle(scene, {7: "python train.py"}.get)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "need", "others"),
    [
        (100, 100, {}),
        (40, 40, {"a/0": (60, 60)}),
        (70, 40, {"a/0": (60, 30)}),  # it may take 30 more
        (40, 40, {"a/0": (60, None)}),  # what it holds cannot be seen
        (100, 40, {"a/0": (60, 0)}),  # nothing yet
        (40 - SLACK_BYTES / GIB, 40, {}),
        (0, 0, {}),  # takes what is free
    ],
)
def test_what_is_there(free: float, need: float, others: dict[str, tuple[int, int | None]]) -> None:
    assert said(free, need, others) == ""


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (
            "GPU 0 (H200) has 60.0 GiB free, less 30.0 GiB that others were promised and have not "
            "taken, where 40.0 GiB are needed: 10.0 GiB too few; held by nobody who can be seen "
            "from here",
            {"free": 60, "need": 40, "others": {"a/0": (60, 30)}},
        ),
        (
            "20.0 GiB too few; pid 7 (python train.py) holds 50.0 GiB; pid 8 (of another user or "
            "container) holds 30.0 GiB",
            {"free": 20, "need": 40, "strangers": {8: 30, 7: 50}},
        ),
        (
            "10.0 GiB too few; a/0 holds 70.0 GiB where it claims 60.0 GiB",
            {"free": 30, "need": 40, "others": {"a/0": (60, 70)}},
        ),
        (
            "3.0 GiB of GPU 0 (H200) are still held by a worker of ours that has ended",
            {"free": 97, "need": 0, "dead": 3},
        ),
    ],
)
def test_what_is_in_the_way_is_named(words: str, kept: dict[str, object]) -> None:
    assert said(**kept).endswith(words)  # type: ignore[arg-type]
