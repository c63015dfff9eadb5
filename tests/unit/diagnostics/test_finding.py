"""Findings for people."""

from __future__ import annotations

from servekit.diagnostics.finding import Finding, findings_text


def test_areas_are_aligned_and_totals_are_told() -> None:
    found = [
        Finding("gpus", "ok", "none"),
        Finding("open files", "warning", "few"),
        Finding("disk", "error", "full"),
        Finding("port", "error", "taken"),
    ]
    assert findings_text(found).splitlines() == [
        "ok       gpus        none",
        "warning  open files  few",
        "error    disk        full",
        "error    port        taken",
        "2 errors, 1 warning",
    ]
    assert findings_text([]) == "0 errors, 0 warnings"
