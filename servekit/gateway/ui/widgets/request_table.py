"""The last requests of the request log, for administrators: a bounded part of it, filtered.

Models, endpoints and ids are clients' words: they are clipped, and shown as text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.answer_html import clean_text, format_moment
from servekit.request_log import RequestRecord, find_version, read_latest
from servekit.units import format_latency

#: Read from the ends of the files, of all gateways together: about 3,000 requests. A request costs
#: 12 µs of the gateway's time.
MOST_BYTES = 2**19
SHOWN = 100
#: The least time between two reads of the files, for all visitors together.
AGAIN_S = 2.0
#: The most characters of a cell.
CELL_CHARS = 200
#: The most names that a filter offers.
CHOICES = 200
#: The status that stands for all requests which failed or whose client left.
FAILED = "failed"
#: The spans of the filter for slow requests, in s.
SLOW_S = (1.0, 5.0, 30.0)


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """What a visitor wants to see; "" and 0 for everything."""

    model: str = ""
    key: str = ""
    status: str = ""  # a number, or FAILED
    slow_s: float = 0.0

    def fits(self, one: RequestRecord) -> bool:
        named = self.model in ("", one.model) and self.key in ("", one.key)
        failed = one.failed if self.status == FAILED else self.status in ("", str(one.status))
        return named and failed and one.total_s >= self.slow_s


class RecentRequests:
    """Reads the request log in the run directory `folder`, if there is one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._read_s = float("-inf")
        self._kept: list[RequestRecord] = []
        self._version: object = None  # of the files that were read

    async def records(self) -> list[RequestRecord]:
        """Return the last requests, the newest first."""
        now_s = time.monotonic()
        if self._folder is not None and now_s - self._read_s >= AGAIN_S:
            self._read_s = now_s  # other visitors get the records before until these are read
            await asyncio.to_thread(self._read, self._folder)
        return self._kept

    def _read(self, folder: Path) -> None:
        if (version := find_version(folder)) != self._version:
            self._kept, self._version = read_latest(folder, MOST_BYTES), version


@dataclass(frozen=True, slots=True)
class FilterChoices:
    """The models, keys and statuses of the last requests."""

    models: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()


def find_choices(records: Sequence[RequestRecord]) -> FilterChoices:
    return FilterChoices(
        tuple(sorted({one.model for one in records if one.model})[:CHOICES]),
        tuple(sorted({one.key for one in records if one.key})[:CHOICES]),
        tuple(sorted({str(one.status) for one in records})),
    )


def render_requests(records: Sequence[RequestRecord], wanted: RequestFilter, say: Say) -> str:
    """Return a table, the newest request first, with times in UTC; on a phone, rows are cards."""
    found = [one for one in records if wanted.fits(one)]
    if not found:
        words = say("requests.none_fits" if records else "requests.none")
        return f'<p class="sk-quiet">{escape(words)}</p>'
    shown = found[:SHOWN]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(records[-1].at))
    told = say("requests.count", shown=len(shown), count=f"{len(found):,}", since=since)
    heads = "".join(f'<th scope="col">{escape(say(f"requests.{name}"))}</th>' for name in _NAMES)
    rows = "".join(_render_row(one, say) for one in shown)
    label = escape(say("requests.title"))
    return (
        f'<p class="sk-quiet">{escape(told)}</p>'
        f'<div class="sk-scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="sk-workers sk-requests"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


_NAMES = ("time", "status", "model", "key", "endpoint", "tokens", "queue", "first", "total", "id")
#: The style classes of cells that may be long.
_STYLES = {"model": "sk-long", "key": "sk-long", "endpoint": "sk-long sk-mono"}
_STYLES["id"] = _STYLES["endpoint"]


def _render_row(one: RequestRecord, say: Say) -> str:
    mark = "bad" if one.failed else "good"
    cached = f" ({one.cached_tokens:,})" if one.cached_tokens else ""
    cells = (
        f'<span class="sk-dot sk-{mark}"></span> {one.status}{_render_outcome(one)}',
        _clip(one.model),
        _clip(one.key),
        _clip(one.endpoint),
        f"{one.prompt_tokens:,}{cached} → {one.completion_tokens:,}" if one.outcome else "",
        format_latency(one.queue_s) if one.queue_s else "",
        format_latency(one.first_s) if one.first_s else "",
        format_latency(one.total_s),
        _clip(one.id),
    )
    told = "".join(
        f'<td class="{_STYLES.get(name, "") if cell else "sk-none"}" '
        f'data-label="{escape(say(f"requests.{name}"))}">{cell or "–"}</td>'
        for name, cell in zip(_NAMES[1:], cells, strict=True)
    )
    at = format_moment(one.at, time.time())
    return f'<tr><th scope="row">{at}</th>{told}</tr>'


def _render_outcome(one: RequestRecord) -> str:
    plain = one.outcome in ("", "stop")
    return "" if plain else f' <span class="sk-detail-words">{_clip(one.outcome)}</span>'


def _clip(text: str) -> str:
    return escape(clean_text(text)[:CELL_CHARS])
