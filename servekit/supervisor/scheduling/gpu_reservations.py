"""The book of GPU memory: what is promised to whom, and what each really holds.

A holder is a worker, by its name. Its claim stands from before it is started until it is reaped
and NVML shows its memory gone; no byte of a GPU is ever in two claims, nor in one and in the
reserve. What is measured stands beside it and changes no promise. Pure: it asks nobody, and who
writes is one, the supervisor's loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servekit.errors import ServekitError
from servekit.supervisor.scheduling.memory_requests import gib, reserve_bytes
from servekit.system.gpus import Gpu


class InsufficientMemory(ServekitError):
    """A claim does not fit beside those that stand; `lacking_bytes` by the GPU's UUID."""

    def __init__(self, message: str, lacking_bytes: Mapping[str, int]) -> None:
        super().__init__(message)
        self.lacking_bytes = lacking_bytes


class GpuReservations:
    """Claims on `gpus`, of each of which `reserve` (2GiB, 5%) is nobody's. All keys are UUIDs."""

    def __init__(self, gpus: Sequence[Gpu], reserve: str | None = None) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._reserved = {gpu.uuid: reserve_bytes(gpu, reserve) for gpu in gpus}
        self._claims: dict[str, dict[str, int]] = {}
        self._measured: dict[str, dict[str, int]] = {}

    def claim(self, holder: str, wants: Mapping[str, int]) -> None:
        """Promise these bytes, instead of what was promised to `holder` before.

        Raises NoRoom, with the arithmetic, and then has changed nothing.
        """
        lacking = self.lacking(wants, but=holder)
        if lacking:
            raise InsufficientMemory(self.explain(holder, wants), lacking)
        self._claims[holder] = dict(wants)

    def release(self, holder: str) -> None:
        """Its memory is free again; one that is not known has none."""
        self._claims.pop(holder, None)
        self._measured.pop(holder, None)

    def measured(self, holder: str, held: Mapping[str, int]) -> None:
        """What NVML has told of it. Without a claim it is not kept."""
        if holder in self._claims:
            self._measured[holder] = dict(held)

    # ---- what there is

    def room(self, uuid: str) -> int:
        """Bytes of a GPU that nobody has been promised."""
        return self._room(uuid, "")

    def lacking(self, wants: Mapping[str, int], but: str = "") -> dict[str, int]:
        """Bytes that are missing for such a claim, on the GPUs where some are.

        `but`: a holder whose own claim does not count, since it would be replaced.
        """
        short = {uuid: want - self._room(uuid, but) for uuid, want in wants.items()}
        return {uuid: missing for uuid, missing in short.items() if missing > 0}

    def holders(self, uuid: str) -> dict[str, int]:
        """Who has been promised how much of a GPU."""
        return {name: claim[uuid] for name, claim in self._claims.items() if uuid in claim}

    def claim_of(self, holder: str) -> Mapping[str, int]:
        """What was promised to it, by GPU."""
        return self._claims.get(holder, {})

    def held(self, holder: str) -> Mapping[str, int]:
        """What it really holds, by GPU, as last measured."""
        return self._measured.get(holder, {})

    def excess(self, holder: str) -> dict[str, int]:
        """Bytes that it holds beyond its claim, on the GPUs where it does."""
        claim = self.claim_of(holder)
        over = {uuid: held - claim.get(uuid, 0) for uuid, held in self.held(holder).items()}
        return {uuid: more for uuid, more in over.items() if more > 0 and uuid in claim}

    def explain(self, holder: str, wants: Mapping[str, int]) -> str:
        """Why a claim does not fit: what each GPU has, who was promised it, what is missing."""
        told = [self._sum(uuid, want, holder) for uuid, want in wants.items()]
        return f"there is no room for {holder}: {'; '.join(filter(None, told))}"

    def _room(self, uuid: str, but: str) -> int:
        if uuid not in self._gpus:
            return 0
        promised = sum(size for name, size in self.holders(uuid).items() if name != but)
        return self._gpus[uuid].total_bytes - self._reserved[uuid] - promised

    def _sum(self, uuid: str, want: int, but: str) -> str:
        """ "GPU 0 (H200) has 139.8 GiB, less 2.0 GiB reserved, less …: …", where it is short."""
        missing = want - self._room(uuid, but)
        if missing <= 0:
            return ""
        if uuid not in self._gpus:
            return f"there is no GPU {uuid}"
        others = [(name, size) for name, size in self.holders(uuid).items() if name != but]
        less = [("the reserve", self._reserved[uuid])] if self._reserved[uuid] else []
        taken = ", ".join(f"{gib(size)} {name}'s" for name, size in (*less, *others))
        gpu = self._gpus[uuid]
        return (
            f"of {gpu}'s {gib(gpu.total_bytes)}, {taken or 'nothing is promised'}, and it claims "
            f"{gib(want)}, {gib(missing)} too much"
        )
