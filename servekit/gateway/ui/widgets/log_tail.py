"""The last lines of the processes' logs, for holders of a key with `admin: true`.

Lines may contain users' input: they are read from the ends of the files, clipped, and shown as
text. However many visitors look, only the shown lines are kept.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections import OrderedDict
from html import escape
from pathlib import Path
from typing import Any

from servekit import log_events
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.answer_html import clean_text
from servekit.log_files import LogLine, find_log_files, is_of, last_lines, timestamp_of

LINES = 150
LINE_CHARS = 600
#: The bytes read from the end of each file; and the most files, the latest written first.
FILE_BYTES = 96 * 2**10
FILES = 64
#: The least time between two reads of the files, for all visitors together.
AGAIN_S = 1.0
_CHOICES = 64
_LEVELS = ("warning", "error", "critical")
#: Fields of our own log lines that are shown elsewhere or not at all.
_APART = ("timestamp", "level", "event", "process", "component", "logger")


class Tail:
    """Reads the logs in the run directory `folder`, if there is one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: OrderedDict[str, tuple[float, list[LogLine]]] = OrderedDict()

    async def lines(self, name: str) -> list[LogLine]:
        """Return the last lines of a process or a model, the newest last; "" for all."""
        now_s = time.monotonic()
        at_s, found = self._kept.get(name, (float("-inf"), []))
        if self._folder is not None and now_s - at_s >= AGAIN_S:
            found = await asyncio.to_thread(read_log, self._folder, name)
            self._kept[name] = now_s, found
            self._kept.move_to_end(name)
            if len(self._kept) > _CHOICES:
                self._kept.popitem(last=False)
        return found

    async def names(self) -> list[str]:
        """Return the names of processes that have written logs."""
        return [] if self._folder is None else await asyncio.to_thread(_list_names, self._folder)


def read_log(folder: Path, name: str) -> list[LogLine]:
    """Return the last lines of the files in `folder`. Blocks on the disk."""
    found = [(one, path) for one, path in find_log_files(folder).items() if is_of(one, name)]
    found = sorted(found, key=lambda one: -_get_mtime(one[1]))[:FILES]
    each = [last_lines(one, path, LINES, FILE_BYTES) for one, path in found]
    return list(heapq.merge(*each, key=lambda line: line.at))[-LINES:]


def _list_names(folder: Path) -> list[str]:
    return list(find_log_files(folder))


def _get_mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def render_log(lines: list[LogLine], say: Say) -> str:
    """Return a list, the newest line first; its style reverses it and keeps that in view."""
    if not lines:
        return f'<p class="sk-quiet">{escape(say("log.none"))}</p>'
    label = escape(say("log.title"))
    rows = "".join(map(_render_row, reversed(lines)))
    return (
        f'<div class="sk-log" tabindex="0" role="region" aria-label="{label}"><ol>{rows}</ol></div>'
    )


def _render_row(line: LogLine) -> str:
    level, text = parse_line(line.text)
    mark = f' class="sk-{level}"' if level in _LEVELS else ""
    at = timestamp_of(line.text)[:19].replace("T", " ")
    at = at.removeprefix(time.strftime("%Y-%m-%d ", time.gmtime()))  # of today
    when = f"<time>{escape(at)}</time> " if at else ""
    return f"<li{mark}>{when}<b>{escape(line.name)}</b> {escape(text)}</li>"


def parse_line(text: str) -> tuple[str, str]:
    """Return a line's level and its clipped text; a foreign line is shown as it is."""
    level, said = "", text
    if text.startswith("{"):
        fields = _parse_fields(text)
        if "event" in fields:
            level = str(fields.get("level", ""))
            rest = {key: value for key, value in fields.items() if key not in _APART}
            said = log_events.sentence(str(fields["event"]), rest)
    shown = " ".join(clean_text(said[: 4 * LINE_CHARS]).split())
    return level, shown if len(shown) <= LINE_CHARS else f"{shown[:LINE_CHARS]} …"


def _parse_fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
