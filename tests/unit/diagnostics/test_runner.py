"""The forms of `servekit doctor`'s answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

from servekit.diagnostics.finding import Finding
from servekit.diagnostics.runner import format_findings, keep_going

FOUND = [Finding("disk", "error", "full")]


def test_findings_are_text_or_json() -> None:
    text = format_findings(FOUND, as_json=False)
    assert text == "error    disk  full\n1 error, 0 warnings"
    told = json.loads(format_findings(FOUND, as_json=True))
    assert told == [{"area": "disk", "level": "error", "said": "full"}]


def test_a_file_that_cannot_be_read_ends_its_area_only() -> None:
    def check() -> Iterator[Finding]:
        yield from FOUND
        raise PermissionError(13, "Permission denied", "/root/it")

    first, second = keep_going("service", check())
    assert [first] == FOUND
    assert (second.area, second.level) == ("service", "error")
    assert second.said.startswith("/root/it: Permission denied; ")
