"""The forms of `servekit doctor`'s answer."""

from __future__ import annotations

import json

from servekit.diagnostics.finding import Finding
from servekit.diagnostics.runner import format_findings

FOUND = [Finding("disk", "error", "full")]


def test_findings_are_text_or_json() -> None:
    text = format_findings(FOUND, as_json=False)
    assert text == "error    disk  full\n1 errors, 0 warnings"
    told = json.loads(format_findings(FOUND, as_json=True))
    assert told == [{"area": "disk", "level": "error", "said": "full"}]
