"""`python -m tests.deploy.audit`: whether a known vulnerability is in what constraints.txt pins.

pip-audit asks an advisory service. Where that is not reached, or knows nothing of the packages, as
behind a mirror, pip-audit may end as if all were well: here that is told as what it is, and the
exit code is 3. It is 1 for a vulnerability, 0 where each package was looked up and none was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[2] / "deploy" / "constraints.txt"
NOT_ASKED = 3


@dataclass(frozen=True, slots=True)
class Finding:
    code: int
    told: str


def judge(report: dict[str, Any] | None, said: str) -> Finding:
    """From pip-audit's own report, None where there is none, and what else it said."""
    if report is None:
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        return Finding(NOT_ASKED, f"NOT AUDITED: the advisory service was not reached: {last[0]}")
    packages = report["dependencies"]
    known = [one for one in packages if "vulns" in one]
    bad = [f"{one['name']} {one['version']}: {v['id']}" for one in known for v in one["vulns"]]
    if bad:
        return Finding(1, "VULNERABLE: " + "; ".join(bad))
    if len(known) < len(packages):
        missing = len(packages) - len(known)
        return Finding(NOT_ASKED, f"NOT AUDITED: nothing is known of {missing} of {len(packages)}")
    return Finding(0, f"none of {len(packages)} packages has a known vulnerability")


def main() -> int:
    tool = Path(sys.executable).parent / "pip-audit"
    command = [str(tool), "-r", str(CONSTRAINTS), "--no-deps", "--disable-pip", "-f", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        finding = judge(_report(done.stdout), done.stderr)
    except subprocess.TimeoutExpired:
        finding = judge(None, "no answer for 300 s")
    print(finding.told)
    return finding.code


def _report(text: str) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return report


if __name__ == "__main__":
    sys.exit(main())
