"""What clients could do, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a client was asked to do."""

    client: str
    version: str
    what: str
    passed: bool
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.client} {self.what}: {'passed' if self.passed else 'FAILED'} {self.detail}"


def table(checks: Sequence[Check]) -> str:
    """A row for each client; a failure says what it was."""
    lines = ["| client | version | passed | failed |", "|---|---|---|---|"]
    for client in dict.fromkeys(check.client for check in checks):
        own = [check for check in checks if check.client == client]
        passed = ", ".join(check.what for check in own if check.passed)
        failed = "; ".join(f"{check.what}: {check.detail}" for check in own if not check.passed)
        lines.append(f"| {client} | {own[0].version} | {passed} | {_plain(failed)} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
