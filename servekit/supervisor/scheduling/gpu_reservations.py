"""Ledger of GPU memory: the claims of workers, and the bytes that each really holds.

A holder is a worker, by its name. Its claim stands from before the worker is started until it is
reaped and NVML shows its memory free. Claims never overlap with each other or with the reserve.
Measured bytes are kept beside the claims and do not change them. Pure: no I/O, and the supervisor's
event loop is the only writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servekit.errors import ServekitError
from servekit.supervisor.scheduling.memory_requests import reserve_bytes
from servekit.system.gpu.gpus import Gpu
from servekit.units import format_bytes


class InsufficientMemory(ServekitError):
    """A claim that does not fit beside the others; `lacking_bytes` by the GPU's UUID."""

    def __init__(self, message: str, lacking_bytes: Mapping[str, int]) -> None:
        super().__init__(message)
        self.lacking_bytes = lacking_bytes


class GpuReservations:
    """Claims on `gpus`, less the `reserve` ("2GiB", "5%") of each GPU. All keys are UUIDs."""

    def __init__(self, gpus: Sequence[Gpu], reserve: str | None = None) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._reserved = {gpu.uuid: reserve_bytes(gpu, reserve) for gpu in gpus}
        self._claims: dict[str, dict[str, int]] = {}
        self._measured: dict[str, dict[str, int]] = {}

    def reserve(self, holder: str, wants: Mapping[str, int]) -> None:
        """Set the claim of `holder`, in place of its previous one.

        Raises InsufficientMemory, with the arithmetic, and then changes nothing.
        """
        lacking = self.lacking(wants, but=holder)
        if lacking:
            raise InsufficientMemory(self.explain(holder, wants), lacking)
        self._claims[holder] = dict(wants)

    def release_claim(self, holder: str) -> None:
        """Remove the claim and measurements of `holder`, if any."""
        self._claims.pop(holder, None)
        self._measured.pop(holder, None)

    def measured(self, holder: str, held: Mapping[str, int]) -> None:
        """Store the bytes that NVML reports for `holder`; ignored where it has no claim."""
        if holder in self._claims:
            self._measured[holder] = dict(held)

    # ---- queries

    def room(self, uuid: str) -> int:
        """Return the bytes of a GPU that are not claimed."""
        return self._room(uuid, "")

    def lacking(self, wants: Mapping[str, int], but: str = "") -> dict[str, int]:
        """Return the bytes that are missing for such a claim, on the GPUs that are short.

        The claim of holder `but` does not count, since the new one would replace it.
        """
        short = {uuid: want - self._room(uuid, but) for uuid, want in wants.items()}
        return {uuid: missing for uuid, missing in short.items() if missing > 0}

    def holders(self, uuid: str) -> dict[str, int]:
        """Return the claims on a GPU, by holder."""
        return {name: claim[uuid] for name, claim in self._claims.items() if uuid in claim}

    def claim_of(self, holder: str) -> Mapping[str, int]:
        """Return the claim of a holder, by GPU."""
        return self._claims.get(holder, {})

    def held_bytes(self, holder: str) -> Mapping[str, int]:
        """Return the bytes that a holder really holds, by GPU, as last measured."""
        return self._measured.get(holder, {})

    def excess(self, holder: str) -> dict[str, int]:
        """Return the bytes that a holder holds beyond its claim, on the GPUs where it does."""
        claim = self.claim_of(holder)
        over = {uuid: held - claim.get(uuid, 0) for uuid, held in self.held_bytes(holder).items()}
        return {uuid: more for uuid, more in over.items() if more > 0 and uuid in claim}

    def explain(self, holder: str, wants: Mapping[str, int]) -> str:
        """Return why a claim does not fit: each GPU's memory, the other claims, the shortage."""
        told = [self._sum(uuid, want, holder) for uuid, want in wants.items()]
        return f"there is no room for {holder}: {'; '.join(filter(None, told))}"

    def _room(self, uuid: str, but: str) -> int:
        if uuid not in self._gpus:
            return 0
        promised = sum(size for name, size in self.holders(uuid).items() if name != but)
        return self._gpus[uuid].total_bytes - self._reserved[uuid] - promised

    def _sum(self, uuid: str, want: int, but: str) -> str:
        """Return such as "of GPU 0's 139.8 GiB, …" for a GPU that is short, else ""."""
        missing = want - self._room(uuid, but)
        if missing <= 0:
            return ""
        if uuid not in self._gpus:
            return f"there is no GPU {uuid}"
        others = [(name, size) for name, size in self.holders(uuid).items() if name != but]
        less = [("the reserve", self._reserved[uuid])] if self._reserved[uuid] else []
        taken = ", ".join(f"{format_bytes(size)} {name}'s" for name, size in (*less, *others))
        gpu = self._gpus[uuid]
        return (
            f"of {gpu}'s {format_bytes(gpu.total_bytes)}, {taken or 'nothing is reserved'}, and it "
            f"claims {format_bytes(want)}, {format_bytes(missing)} too much"
        )
