"""The status of a worker, for gateways and operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from servekit.protocol.messages import ReplicaHistory, ReplicaStatus

if TYPE_CHECKING:
    from servekit.supervisor.workers.worker_process import WorkerProcess


def status_of(replica: WorkerProcess) -> ReplicaStatus:
    """Return the status for gateways, which use state and address, and for operators."""
    last, vram, place = replica.pulse.last, replica.vram, replica.place
    return ReplicaStatus(
        name=replica.name,
        state=replica.state,
        socket=replica.address,
        pid=replica.pid,
        device=replica.device,
        gpus=tuple(gpu.uuid for gpu in vram.own),
        progress=replica.progress,
        reason=replica.reason,
        restarts=replica.restarts,
        running=last.running,
        waiting=last.waiting,
        rss_bytes=replica.rss_bytes,
        gpu_bytes=vram.held_bytes,
        timings_s=replica.timings_s,
        stray=vram.stray,
        claim_bytes=sum(place.claims),
        excess=vram.excess,
        kv_used=replica.pulse.kv_used,
        trouble=replica.trouble,
        held_bytes=tuple(vram.by_gpu.get(gpu.uuid, 0) for gpu in vram.own),
        generation=replica.generation,
    )


def story_of(one: WorkerProcess, story: ReplicaHistory) -> ReplicaHistory:
    """Return the worker's history, with what it waits for while it has no process."""
    waits = one.progress.phase if one.child is None and one.progress is not None else ""
    reason = one.trouble or "; ".join(filter(None, (story.reason, waits)))
    return replace(story, reason=reason)
