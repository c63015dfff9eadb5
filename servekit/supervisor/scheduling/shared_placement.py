"""Conversion of the configuration for `bin_packing`, and error messages with the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.bin_packing import Unplaceable, Want, pack
from servekit.supervisor.scheduling.memory_requests import (
    Misplaced,
    claim_bytes,
    least,
    room_bytes,
)
from servekit.system.gpu.gpus import Gpu, Slot
from servekit.units import format_bytes


def place_shared(
    models: Sequence[ModelConfig],
    wanted: Mapping[str, Sequence[Gpu]],
    gpus: Sequence[Gpu],
    held: Mapping[str, Sequence[Slot]],
    reserve: str | None,
) -> dict[str, list[Slot]]:
    """Return the slots of each model, found by search over their claims. Raises Misplaced."""
    rooms = {gpu: room_bytes(gpu, reserve) for gpu in gpus}
    wants = []
    for index, model in enumerate(models):
        if model.name in wanted:
            want = want_of(model, wanted[model.name], held.get(model.name, ()), reserve)
            _refuse_alone(index, model, want, rooms)
            wants.append(want)
    try:
        return pack(wants, rooms)
    except Unplaceable as error:
        index = next(i for i, m in enumerate(models) if m.name == error.want.name)
        message = _arithmetic(error)
        raise Misplaced(message, "models", index, _to_blame(models[index])) from None


def _to_blame(model: ModelConfig) -> str:
    """Return the key most likely to need another value."""
    if model.memory is not None:
        return "memory"
    return "replicas" if model.load == "on_start" else "load"


def want_of(
    model: ModelConfig, allowed: Sequence[Gpu], held: Sequence[Slot], reserve: str | None
) -> Want:
    """Return the requirements of a model on the GPUs that it may use."""
    return Want(
        name=model.name,
        least=least(model),
        width=model.gpus_per_replica,
        claims={gpu: claim_bytes(model, gpu, reserve) for gpu in allowed},
        stays=model.load == "on_start",
        grows=model.load == "on_start" and model.replicas == "auto",
        held=tuple(held),
        shares=model.memory is not None and model.replicas != "auto",
    )


def _refuse_alone(index: int, model: ModelConfig, want: Want, rooms: Mapping[Gpu, int]) -> None:
    """Raise Misplaced for a model that could not be placed even if it were alone."""
    claims = want.claims
    if want.width > len(claims):
        message = f"model {want.name!r} spreads each replica over {want.width} GPUs, and it may "
        message += f"use {len(claims)}: {', '.join(map(str, claims))}"
        raise Misplaced(message, "models", index, "gpus_per_replica")
    if not want.shares and want.width * want.least > len(claims):
        total = want.width * want.least
        message = f"model {want.name!r} needs {total} GPUs for {want.least} replicas of "
        message += (
            f"{want.width}, and it may use {len(claims)}: {total - len(claims)} too few; two "
        )
        message += "of them share a GPU only where `memory` says what each takes"
        raise Misplaced(message, "models", index, "replicas")
    if sum(claims[gpu] <= rooms[gpu] for gpu in claims) < want.width:
        told = "; ".join(_left(want, gpu, rooms[gpu], []) for gpu in claims)
        raise Misplaced(f"model {want.name!r} {told}", "models", index, "memory")


def _arithmetic(error: Unplaceable) -> str:
    """Return the claim of the unplaced worker, and what each GPU has left for it."""
    want, board = error.want, error.board
    number = len(board.slots_of(want))
    told = []
    for gpu in want.claims:
        own = board.count_workers(want, gpu)
        if own and not want.shares:
            told.append(f"{gpu} has one of its replicas already")
            continue
        others = board.claims_on(gpu, stays=True)
        if not want.stays:
            others += [(want.name, want.claims[gpu])] * own
        elif passing := board.on_demand_bytes(gpu):
            others.append(max(passing, key=lambda one: one[1]))
        told.append(_left(want, gpu, board.rooms[gpu], others))
    wide = f" on {want.width} GPUs" if want.width > 1 else ""
    tries = " in the time that a search may take" if error.gave_up else ""
    return (
        f"no place was found{tries} for {want.name}/{number}{wide} beside the others: "
        f"it {'; '.join(told)}"
    )


def _left(want: Want, gpu: Gpu, room: int, others: Sequence[tuple[str, int]]) -> str:
    """Return such as "claims 60.0 GiB of GPU 0 (H200), which has 80.0 GiB, …: 22.0 too much"."""
    left = room - sum(size for _, size in others)
    reserved = gpu.total_bytes - room
    taken = [f"less {format_bytes(reserved)} reserved"] if reserved else []
    taken += [f"less {format_bytes(size)} of {name}" for name, size in others]
    has = ", ".join([format_bytes(gpu.total_bytes), *taken])
    short = want.claims[gpu] - left
    rest = f"{format_bytes(short)} too much" if short > 0 else "which fits"
    return f"claims {format_bytes(want.claims[gpu])} of {gpu}, which has {has}: {rest}"
