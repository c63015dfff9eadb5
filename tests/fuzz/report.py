"""What a run has shown, as Markdown, and what it found wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tests.fuzz.processes import Usage
from tests.fuzz.run import Failure, Row

MIB = 2**20
#: The shortest requests shown of each fault, and how much of them.
SHOWN = 3
SHOWN_BYTES = 1500


def requests_table(rows: dict[str, Row]) -> str:
    lines = ["| endpoint | requests | answers | slowest |", "|---|--:|---|--:|"]
    for name, row in sorted(rows.items(), key=lambda item: (item[0][:1] != "/", item[0])):
        statuses = ", ".join(
            f"{count} × {status}" for status, count in sorted(row.statuses.items())
        )
        shown = f"`{name}`" if name.startswith("/") else name
        slowest = f"{row.slowest_s:.2f} s (case {row.slowest})"
        lines.append(f"| {shown} | {row.requests} | {statuses} | {slowest} |")
    return "\n".join(lines)


def memory_table(usages: Iterable[Usage]) -> str:
    lines = [
        "| process | memory at the start | after the warm-up | at the end | growth in the warm-up"
        " | after it | of that steady | descriptors before, after |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in usages:
        sizes = (one.start_bytes, one.warm_bytes, one.end_bytes)
        shown = " | ".join(f"{size / MIB:.1f} MiB" for size in sizes)
        fds = f"{one.fds_before}, {one.fds_after}"
        grown = f"{one.warming:+.1%} | {one.growth:+.1%} | {one.steady:+.1%}"
        lines.append(f"| {one.name} | {shown} | {grown} | {fds} |")
    return "\n".join(lines)


def failures_text(failures: list[Failure]) -> str:
    """The shortest offending requests of each fault."""
    by: dict[tuple[str, str], list[Failure]] = defaultdict(list)
    for failure in failures:
        by[failure.what, failure.case.endpoint].append(failure)
    parts = []
    for (what, endpoint), found in sorted(by.items(), key=lambda item: -len(item[1])):
        parts.append(f"{len(found)} × {endpoint}: {what}")
        for failure in sorted(found, key=lambda one: one.case.size_bytes)[:SHOWN]:
            case = failure.case
            data = b"".join(case.pieces)
            parts.append(f"  case {case.number}, {len(data)} bytes: {data[:SHOWN_BYTES]!r}")
    return "\n".join(parts)
