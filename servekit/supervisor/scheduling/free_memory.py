"""Whether a GPU has the memory that a worker is about to take. Pure: a scene in, a sentence out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from servekit.supervisor.scheduling.memory_requests import gib
from servekit.system import procfs
from servekit.system.gpus import Gpu

#: What a driver keeps here and there, and CUDA rounds up, is no reason to wait.
SLACK_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """One GPU as it is, and what is needed of it."""

    gpu: Gpu
    free_bytes: int
    need_bytes: int
    others: Mapping[str, tuple[int, int | None]]  # claim, and what it holds; None: not known
    dead_bytes: int  # held by workers that have ended
    strangers: Mapping[int, int]  # by PID, what processes hold that are not ours


def short_bytes(scene: GpuSnapshot) -> int:
    """What lacks, so that others would have to go; what our dead hold yet is free without that."""
    short = scene.need_bytes - (scene.free_bytes + scene.dead_bytes - _promised(scene))
    return short if short > SLACK_BYTES else 0


def _promised(scene: GpuSnapshot) -> int:
    """What others may yet take of what is free."""
    known = [(claim, held) for claim, held in scene.others.values() if held is not None]
    return sum(max(0, claim - held) for claim, held in known)


def obstacle(scene: GpuSnapshot, about: Callable[[int], str] = procfs.command) -> str:
    """What stands in the way; "" if nothing. `about` tells what a PID runs.

    Others may yet take what they were promised, so it is not free. What one holds whose processes
    cannot be seen from here is not known, but missing from the free memory already.
    """
    if scene.dead_bytes:
        held = gib(scene.dead_bytes)
        return f"{held} of {scene.gpu} are still held by a worker of ours that has ended"
    short, promised = short_bytes(scene), _promised(scene)
    if not short:
        return ""
    less = f", less {gib(promised)} that others were promised and have not taken" * bool(promised)
    return (
        f"{scene.gpu} has {gib(scene.free_bytes)} free{less}, where {gib(scene.need_bytes)} are "
        f"needed: {gib(short)} too few; {_to_blame(scene, about)}"
    )


def _to_blame(scene: GpuSnapshot, about: Callable[[int], str]) -> str:
    over = [
        f"{name} holds {gib(held)} where it claims {gib(claim)}"
        for name, (claim, held) in scene.others.items()
        if held is not None and held > claim
    ]
    largest = sorted(scene.strangers.items(), key=lambda one: -one[1])
    seen = [
        f"pid {pid} ({about(pid) or 'of another user or container'}) holds {gib(held)}"
        for pid, held in largest
        if held
    ]
    return "; ".join(over + seen) or "held by nobody who can be seen from here"
