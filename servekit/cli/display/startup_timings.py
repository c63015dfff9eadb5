"""The output of `servekit ps --timings`: the start of each process, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from servekit.protocol.control.startup_messages import Cause, Phase, Start, Starts
from servekit.protocol.messages import Status
from servekit.sanitize import one_line

#: Minimum overlap of two phases that count as concurrent.
_BESIDE_S = 0.02
#: Minimum duration for a line of its own.
_LINE_S = 0.005
_SINCE: dict[Cause, str] = {
    "up": "from `servekit up`",
    "reload": "from the reload",
    "request": "from the request for it",
    "operator": "from the operator's request",
    "scale": "from the decision to scale up",
    "restart": "from the previous exit",
    "standby": "from the request for it",
}


def timing_tables(status: Status) -> Sequence[RenderableType]:
    """Return a table for each process: its last start, compared with the one before."""
    shown: list[RenderableType] = []
    for known in status.starts:
        if known.starts:
            shown += [*([""] if shown else []), start_heading(known), _phase_table(known)]
    return shown


def start_heading(known: Starts) -> Text:
    """Return the time, the cause and the duration of a start."""
    start = known.starts[-1]
    at = time.strftime("%H:%M:%S", time.localtime(start.at))
    text = Text(known.name, style="bold").append(f" at {at}, ", "not bold")
    match start.state:
        case "starting":
            text.append(f"starting for {start.total_s:.2f} s {_SINCE[start.cause]}", "yellow")
        case "died":
            text.append(f"did not come up: {how_far(start)}", "red")
        case _ if start.first_token_s is None:
            text.append(f"up after {start.total_s:.2f} s {_SINCE[start.cause]}", "not bold")
        case _:
            text.append(
                f"first token after {start.first_token_s:.2f} s {_SINCE[start.cause]}, "
                f"requests reach it after {start.total_s:.2f} s",
                "not bold",
            )
    return text


def how_far(start: Start) -> str:
    """Describe where a start failed: "failed 0.31 s into weights (within load), 2.30 s from …"."""
    if not start.phases:
        return f"failed {start.total_s:.2f} s {_SINCE[start.cause]}"
    broken = [one for one in start.phases if one.ended_s is None or one.failed]
    last = max(broken or start.phases, key=lambda one: (one.began_s, bool(one.within)))
    ended_s = start.total_s if last.ended_s is None else last.ended_s
    place = f"{last.name} (within {last.within})" if last.within else last.name
    spent_s = max(0.0, ended_s - last.began_s)
    how = f"{spent_s:.2f} s into {place}" if broken else f"after {place}"
    return f"failed {how}, {start.total_s:.2f} s {_SINCE[start.cause]}"


def _phase_table(known: Starts) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("PHASE", no_wrap=True, min_width=16)
    for column in ("BEGAN", "SECONDS", "SHARE", "BEFORE"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("MEANWHILE")
    start = known.starts[-1]
    before = known.starts[-2] if len(known.starts) > 1 else None
    for depth, phase in _walk_phases(start.phases):
        table.add_row(Text("  " * depth + phase.name), *_phase_cells(phase, start, before))
    if (rest_s := start.total_s - covered_s(start)) >= _LINE_S:
        table.add_row("(between)", "", f"{rest_s:.2f}", _format_share(rest_s, start), "", "")
    return table


def _walk_phases(
    phases: Sequence[Phase], above: tuple[Phase, ...] = ()
) -> Iterator[tuple[int, Phase]]:
    """Yield each phase after its enclosing phase, with its depth."""
    for phase in phases:
        if (is_part(phase, above[-1]) if above else not phase.within) and phase not in above:
            yield len(above), phase
            yield from _walk_phases(phases, (*above, phase))


def is_part(phase: Phase, of: Phase) -> bool:
    """Return whether a phase is within another, by name and time: retries repeat a name."""
    over = of.ended_s is not None and phase.began_s > of.ended_s
    return phase.within == of.name and phase.began_s >= of.began_s and not over


def _phase_cells(phase: Phase, start: Start, before: Start | None) -> Iterator[Text]:
    took_s = _end_s(phase, start) - phase.began_s
    then = [] if before is None else [one for one in before.phases if one.name == phase.name]
    then_s = sum(_end_s(one, before) - one.began_s for one in then if before is not None)
    yield Text(f"{phase.began_s:.2f}")
    yield Text(f"{took_s:.2f}", style="red" if phase.failed else "")
    yield Text(_format_share(took_s, start))
    yield Text(f"{then_s:.2f}" if then else "", style="dim")
    beside = ", ".join(dict.fromkeys(one.name for one in _concurrent_phases(phase, start)))
    yield Text("; ".join(filter(None, (_phase_note(phase, start), beside))))


def _phase_note(phase: Phase, start: Start) -> str:
    why = one_line(phase.why)
    if phase.failed:
        return f"failed: {why}" if why else "failed"
    if phase.why:
        return why if why.startswith("not here") else f"not here: {why}"
    if phase.ended_s is None:
        return "running" if start.state == "starting" else "failed"
    return ""


def _concurrent_phases(phase: Phase, start: Start) -> Iterator[Phase]:
    """Yield the phases that ran at the same time, except its enclosing and inner ones."""
    kin = {phase.name, *_enclosing_names(phase, start.phases)}
    for other in start.phases:
        if other.name in kin or phase.name in _enclosing_names(other, start.phases):
            continue
        ends_s = min(_end_s(phase, start), _end_s(other, start))
        if ends_s - max(phase.began_s, other.began_s) >= _BESIDE_S:
            yield other


def _enclosing_names(phase: Phase, phases: Iterable[Phase]) -> set[str]:
    """Return the names of all enclosing phases."""
    within, found = {one.name: one.within for one in phases}, set[str]()
    name = phase.within
    while name and name not in found:
        found.add(name)
        name = within.get(name, "")
    return found


def covered_s(start: Start) -> float:
    """Return the time of a start that is covered by phases."""
    covered_s = reached_s = 0.0
    for phase in start.phases:
        ended_s = min(_end_s(phase, start), start.total_s)
        covered_s += max(0.0, ended_s - max(phase.began_s, reached_s))
        reached_s = max(reached_s, ended_s)
    return covered_s


def _end_s(phase: Phase, start: Start) -> float:
    return start.total_s if phase.ended_s is None else phase.ended_s


def _format_share(time_s: float, start: Start) -> str:
    return f"{100 * time_s / start.total_s:.0f} %" if start.total_s else ""
