"""Pure check of whether a GPU has the memory that a worker is about to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from servekit.system import procfs
from servekit.system.gpus import Gpu
from servekit.units import format_bytes

#: Shortages up to this size are ignored: driver overhead and CUDA's rounding.
SLACK_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """Memory use of one GPU, and the bytes that a worker needs there."""

    gpu: Gpu
    free_bytes: int
    need_bytes: int
    others: Mapping[str, tuple[int, int | None]]  # claim and held bytes (None: unknown), by worker
    dead_bytes: int  # still held by workers that have ended
    strangers: Mapping[int, int]  # bytes held by processes that are not ours, by PID


def short_bytes(scene: GpuSnapshot) -> int:
    """Return the bytes that other workers would have to give up; 0 where none.

    Memory that ended workers still hold becomes free without that, so it counts as free.
    """
    short = scene.need_bytes - (scene.free_bytes + scene.dead_bytes - _promised(scene))
    return short if short > SLACK_BYTES else 0


def _promised(scene: GpuSnapshot) -> int:
    """Return the bytes that other workers claim and have not allocated yet."""
    known = [(claim, held) for claim, held in scene.others.values() if held is not None]
    return sum(max(0, claim - held) for claim, held in known)


def obstacle(scene: GpuSnapshot, about: Callable[[int], str] = procfs.command_line) -> str:
    """Return a message about what is in the way, or "". `about` returns the command of a PID.

    Memory that other workers claim and have not allocated yet does not count as free. Where a
    worker's processes cannot be seen, the memory that it holds is unknown, but already missing from
    the free memory.
    """
    if scene.dead_bytes:
        held = format_bytes(scene.dead_bytes)
        return f"{held} of {scene.gpu} are still held by a worker of ours that has ended"
    short, promised = short_bytes(scene), _promised(scene)
    if not short:
        return ""
    less = f", less {format_bytes(promised)} that others were promised and have not taken" * bool(
        promised
    )
    return (
        f"{scene.gpu} has {format_bytes(scene.free_bytes)} free{less}, where "
        f"{format_bytes(scene.need_bytes)} are needed: {format_bytes(short)} too few; "
        f"{_to_blame(scene, about)}"
    )


def _to_blame(scene: GpuSnapshot, about: Callable[[int], str]) -> str:
    over = [
        f"{name} holds {format_bytes(held)} where it claims {format_bytes(claim)}"
        for name, (claim, held) in scene.others.items()
        if held is not None and held > claim
    ]
    largest = sorted(scene.strangers.items(), key=lambda one: -one[1])
    seen = [
        f"pid {pid} ({about(pid) or 'of another user or container'}) holds {format_bytes(held)}"
        for pid, held in largest
        if held
    ]
    return "; ".join(over + seen) or "held by nobody who can be seen from here"
