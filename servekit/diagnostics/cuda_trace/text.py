"""The text form of a trace's report."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Number of innermost stack frames shown; JSON has all.
_FRAMES = 12


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as lines of text."""
    return "\n".join(_report_lines(report))


def _report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    processes, findings = report["processes"], report["findings"]
    yield (
        f"trace-cuda: exit code {report['exit_code']}, "
        f"{_count_noun(len(processes), 'Python process')}, {_count_noun(len(findings), 'finding')}"
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
        yield f"  {asked['what']} was asked: harmless in this torch, which has no CUDA; one that"
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


def _count_noun(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
