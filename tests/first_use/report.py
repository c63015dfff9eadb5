"""The report of a walk: what was tried, what came, and whether that was right."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """One step of the walk. `wrong` says what was missing; empty where all was as wished."""

    area: str
    tried: str
    seen: str
    wrong: str

    def to_markdown(self) -> str:
        verdict = f"**wrong: {self.wrong}**" if self.wrong else "as wished"
        return f"### `{self.tried}`\n\n{verdict}\n\n```text\n{self.seen.rstrip()}\n```\n"


@dataclass(slots=True)
class Report:
    """All findings, printed as they come."""

    folder: Path
    findings: list[Finding] = field(default_factory=list)

    def add(self, area: str, tried: str, seen: str, wrong: str = "") -> None:
        """Keep a finding and print its line."""
        self.findings.append(Finding(area, tried, seen, wrong))
        print(f"{'WRONG' if wrong else 'ok':5}  {area:9} {tried}", flush=True)
        if wrong:
            print(f"       {wrong}", flush=True)

    @property
    def wrong(self) -> list[Finding]:
        return [one for one in self.findings if one.wrong]

    def write(self) -> Path:
        """Write `report.md`, an area after the other. Return its path."""
        areas = dict.fromkeys(one.area for one in self.findings)
        parts = [f"{len(self.findings)} steps, {len(self.wrong)} not as wished.\n"]
        for area in areas:
            parts.append(f"## {area}\n")
            parts += [one.to_markdown() for one in self.findings if one.area == area]
        path = self.folder / "report.md"
        path.write_text("\n".join(parts))
        return path
