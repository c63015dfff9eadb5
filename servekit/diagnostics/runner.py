"""The run of all checks, in the order of their dependencies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from servekit.diagnostics import finding, packages
from servekit.diagnostics.finding import Finding
from servekit.diagnostics.gpus import check_gpus
from servekit.diagnostics.host import check_host
from servekit.diagnostics.service import check_service
from servekit.system.gpu.gpus import find_gpus
from servekit.system.gpu.nvml_client import driver, is_present


def run_checks(file: Path | None, run_dir: Path | None) -> list[Finding]:
    """Run all checks, within the time of the imports: seconds. Never imports torch itself."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    probed = packages.probe_modules(packages.installed_modules(["torch", *packages.EXTENSIONS]))
    details = driver.query("details") if is_present() else None
    torch = probed.get("torch")
    return [
        *keep_going("software", packages.check_software(probed)),
        *keep_going("gpu", check_gpus(is_present(), details, torch, visible)),
        *keep_going("host", check_host()),
        *keep_going("service", check_service(file, run_dir, find_gpus(visible), torch)),
    ]


def keep_going(area: str, checks: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings; a file that ends the checks of an area, as it cannot be read, is one."""
    try:
        yield from checks
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        said = f"{where}{error.strerror or error}; what comes after it was not checked"
        yield Finding(area, "error", said)


def format_findings(findings: list[Finding], *, as_json: bool) -> str:
    if as_json:
        return json.dumps([asdict(found) for found in findings], indent=2)
    return finding.findings_text(findings)
