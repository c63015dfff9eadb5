"""The evaluation of a trace: the first initialisation of CUDA in each process, and the findings."""

from __future__ import annotations

import linecache
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from servekit.diagnostics.cuda_trace.program import Trace
from servekit.units import count_noun

Line = Mapping[str, Any]

#: The limits of a trace from within Python, stated in every report.
LIMITS = (
    "Native code that initialises CUDA with no Python in between is noticed at the next import, "
    "fork, start of a program, write to CUDA_VISIBLE_DEVICES or exit, not at the moment.",
    "A Python started with -I, -E or -S, and a program that is not Python, records nothing; of "
    "those only open /dev/nvidia* files are seen, looked at every 50 ms.",
    "Changes that C code makes to its environment (setenv) are not seen.",
)


def make_report(trace: Trace) -> dict[str, Any]:
    """Return the report, ready for JSON: `processes`, `findings`, `not_seen`."""
    processes = [_process_report(pid, lines, trace) for pid, lines in trace.lines.items()]
    by_pid = {process["pid"]: process for process in processes}
    findings = [
        found
        for process in processes
        for found in _process_findings(process, by_pid, only_imports=trace.only_imports)
    ]
    return {
        "command": list(trace.command),
        "exit_code": exit_code(trace.returncode),
        "findings": findings,
        "processes": processes,
        "not_seen": [*_blind_spots(trace), *LIMITS],
    }


def exit_code(returncode: int) -> int:
    """Return the exit code as a shell does: 128 plus the signal's number after a signal."""
    return returncode if returncode >= 0 else 128 - returncode


def _process_report(pid: int, lines: Sequence[Line], trace: Trace) -> dict[str, Any]:
    starts = [line for line in lines if line["kind"] == "start"]
    start = starts[-1] if starts else {}  # exec starts a new record with the same PID
    end = next((line for line in reversed(lines) if line["kind"] == "end"), {})
    place, initialised = _find_initialisation(lines)
    after = lines[place + 1 :] if initialised else []
    seen_outside = trace.seen.get(pid, ("", []))[1]
    opened = [line["path"] for line in lines if line["kind"] == "opened"]
    return {
        "pid": pid,
        "parent": start.get("parent"),
        "forked": start.get("forked", False),
        "command": shlex.join(start.get("argv", [])),
        "started_at": start.get("at"),
        "cuda": initialised,
        "asked": next((dict(line) for line in lines if line.get("how") == "probe"), None),
        "forks_after": [dict(line) for line in after if line["kind"] == "fork"],
        "writes": [dict(line) for line in lines if line["kind"] == "visible"],
        "late_writes": [dict(line) for line in after if line["kind"] == "visible"],
        "devices": sorted({*opened, *seen_outside, *end.get("devices", [])}),
        "libraries": sorted(
            {*end.get("mapped", []), *(x["name"] for x in _lines_of_kind(lines, "library"))}
        ),
        "ended": bool(end),
        "broken": [line["error"] for line in lines if line["kind"] == "broken"],
    }


def _lines_of_kind(lines: Sequence[Line], kind: str) -> Iterator[Line]:
    return (line for line in lines if line["kind"] == kind)


def _find_initialisation(lines: Sequence[Line]) -> tuple[int, dict[str, Any] | None]:
    """Return the index and line of the first initialising call; `error` is None if unknown."""
    for place, line in enumerate(lines):
        if line["kind"] == "cuda" and line["how"] != "probe":
            back = next(
                (x for x in _lines_of_kind(lines, "returned") if x["what"] == line["what"]), None
            )
            return place, {**line, "error": back["error"] if back else None}
    return 0, None


def _process_findings(
    process: Line, by_pid: Mapping[int, Line], *, only_imports: bool
) -> Iterator[dict[str, Any]]:
    cuda = process["cuda"]
    if cuda and (cuda["chain"] or only_imports):
        led = " → ".join(cuda["chain"]) or "the module that was asked for"
        yield _make_finding(process, "import", f"an import calls {cuda['what']}: {led}", cuda)
    after = "after CUDA was initialised"
    if cuda and cuda["error"]:
        after = f"after {cuda['what']}, which failed here and elsewhere initialises CUDA"
    for line in process["forks_after"]:
        said = f"{line['what']} {after}: the child cannot use CUDA"
        yield _make_finding(process, "fork", said, line)
    for line in process["late_writes"]:
        if line["value"] != line["before"]:
            said = f"CUDA_VISIBLE_DEVICES becomes {_show_value(line['value'])}, was "
            said += f"{_show_value(line['before'])}, {after}: this has no effect"
            yield _make_finding(process, "late write", said, line)
    parent = by_pid.get(process["parent"] or 0)
    if cuda and process["forked"] and parent and _is_before(parent["cuda"], process["started_at"]):
        said = f"{cuda['what']} in a fork of pid {parent['pid']}, which had initialised CUDA"
        yield _make_finding(process, "fork", said, cuda)


def _is_before(cuda: Line | None, at: float) -> bool:
    return cuda is not None and cuda["at"] <= at


def _make_finding(process: Line, kind: str, said: str, line: Line) -> dict[str, Any]:
    return {"pid": process["pid"], "kind": kind, "said": said, "stack": line["stack"]}


def _show_value(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def _blind_spots(trace: Trace) -> Iterator[str]:
    if not trace.lines:
        yield (
            "No Python process has recorded anything: the command started none that reads "
            "PYTHONPATH and imports sitecustomize."
        )
    for pid, lines in trace.lines.items():
        for line in _lines_of_kind(lines, "blind"):
            yield f"pid {pid} started {shlex.join(line['argv'])} ({line['why']}): not recorded."
        if not any(_lines_of_kind(lines, "end")):
            yield f"pid {pid} ended without a report (a signal, or native code's exit)."
    for pid, (command, devices) in trace.seen.items():
        if pid not in trace.lines:
            yield f"pid {pid} ({command}) recorded nothing; had open {', '.join(devices)}."


#: Number of innermost stack frames shown; JSON has all.
_FRAMES = 12


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as lines of text."""
    return "\n".join(_report_lines(report))


def _report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    processes, findings = report["processes"], report["findings"]
    yield (
        f"trace-cuda: exit code {report['exit_code']}, "
        f"{count_noun(len(processes), 'Python process')}, {count_noun(len(findings), 'finding')}"
    )
    for process in processes:
        yield ""
        yield from _process_lines(process)
        for finding in findings:
            if finding["pid"] == process["pid"]:
                yield f"  FINDING: {finding['said']}"
                if process["cuda"] is None or finding["stack"] != process["cuda"]["stack"]:
                    yield from _stack_lines(finding["stack"])
    yield ""
    yield "Not seen:"
    yield from (f"  - {line}" for line in report["not_seen"])


def _process_lines(process: Mapping[str, Any]) -> Iterator[str]:
    forked = f", forked by pid {process['parent']}" if process["forked"] else ""
    yield f"pid {process['pid']}{forked}: {process['command']}"
    if (cuda := process["cuda"]) is None:
        yield "  did not initialise CUDA, as far as could be seen"
    else:
        yield f"  {_cause_of(cuda)}, {cuda['at'] - process['started_at']:.2f} s after its start"
        yield from _reason_lines(cuda)
    if (asked := process["asked"]) is not None and cuda is None:
        yield f"  {asked['what']} was called: harmless in this torch, which has no CUDA; one that"
        yield "  has initialises the driver there (PYTORCH_NVML_BASED_CUDA_CHECK=1 spares that)"
        yield from _reason_lines(asked)
    for line in process["writes"]:
        if line not in process["late_writes"]:
            yield f"  CUDA_VISIBLE_DEVICES became {line['value']!r}, in time"
    yield f"  devices opened: {', '.join(process['devices']) or 'none'}"
    if process["libraries"]:
        yield f"  libraries in memory (harmless as such): {', '.join(process['libraries'])}"
    yield from (f"  the recorder broke: {error}" for error in process["broken"])


def _cause_of(cuda: Mapping[str, Any]) -> str:
    if cuda["how"] == "lookup":
        return f"CUDA: {cuda['what']} was looked up, and presumably called"
    if cuda["how"] == "device":
        return f"CUDA was initialised by native code; noticed at {cuda['noticed_at']}"
    if cuda["error"] is None:
        return f"CUDA: {cuda['what']} was called and did not return"
    if cuda["error"]:
        return f"CUDA: {cuda['what']} was called and failed ({cuda['error'].splitlines()[0]})"
    return f"CUDA was initialised by {cuda['what']}"


def _reason_lines(line: Mapping[str, Any]) -> Iterator[str]:
    if line["chain"]:
        yield f"  while importing: {' → '.join(line['chain'])}"
    yield from _stack_lines(line["stack"])


def _stack_lines(stack: Sequence[Sequence[Any]]) -> Iterator[str]:
    if len(stack) > _FRAMES:
        yield f"    … {len(stack) - _FRAMES} more"
    for file, number, function in stack[-_FRAMES:]:
        yield f"    {file}:{number} in {function}"
        if code := linecache.getline(file, number).strip():
            yield f"        {code}"
