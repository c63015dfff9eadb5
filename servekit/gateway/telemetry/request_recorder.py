"""The gateway's part of the request log: what it notes of each request, and the writer.

On the hot path a request appends a tuple to a list. Once a second a thread turns the list into
lines of the file, and the first of them into lines of the log.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic, time
from typing import Any

import msgspec
import structlog

from servekit.errors import ClientClosed, InvalidKey
from servekit.gateway.http.request_context import RequestContext
from servekit.request_log import MOST_BYTES, Line, RequestRecord, make_record

log: Any = structlog.get_logger("servekit.gateway")

#: Requests of a second that are written; further ones are only counted, as a line costs some 3 µs.
MOST_PENDING = 1000
#: Of these, those without a valid key: strangers must not displace what the keys' holders ask.
MOST_STRANGERS = 20
#: Lines of each second that are also in the gateway's log, which the supervisor shows.
MOST_SHOWN = 20
#: Longest path and name of a model that is written: clients choose them.
_MOST_CHARS = 200
#: Paths that probes, scrapers and browsers ask all the time.
_UNLOGGED = {"/", "/livez", "/readyz", "/health", "/v1/health", "/ping", "/metrics"}
_UNLOGGED_FOLDERS = ("/ui", "/docs", "/static", "/favicon", "/openapi")


class RequestRecorder:
    """The requests of this process that are not written yet. Until `on` it notes none."""

    def __init__(self) -> None:
        self.on = False
        self.path: Path | None = None
        self._pending: list[tuple[Any, ...]] = []
        self._lost = self._strangers = 0
        self._failing = False

    def note_request(self, path: str | bytes, status: int, origin: RequestContext) -> None:
        """Note a request whose answer has ended. Called on the hot path: no object is kept."""
        if not self.on:
            return
        strange = status == InvalidKey.status
        if len(self._pending) >= MOST_PENDING or (strange and self._strangers >= MOST_STRANGERS):
            self._lost += 1
            return
        self._strangers += strange
        self._pending.append(
            (origin.id, path, status, origin.key, origin.began_s, monotonic(), origin.calls)
        )

    def note_asgi(self, path: str, status: int, origin: RequestContext) -> None:
        """Note a request by ASGI, unless it is of a probe or a page, and no error of it.

        A page that its visitor has left before it was drawn is no error.
        """
        fails = status >= 400 and status != ClientClosed.status
        if fails or not (path in _UNLOGGED or path.startswith(_UNLOGGED_FOLDERS)):
            self.note_request(path, status, origin)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def flush(self) -> None:
        """Write what is pending. Blocks: call it in a thread."""
        pending, self._pending = self._pending, []
        lost, self._lost, self._strangers = self._lost, 0, 0
        if not pending:
            return
        clock = time() - monotonic()
        lines = [
            (round(clock + ended_s, 3), id.decode("ascii"), _as_text(path), *rest, ended_s, calls)
            for id, path, *rest, ended_s, calls in pending
        ]
        if self.path is not None:
            self._write(self.path, lines)
        for line in lines[:MOST_SHOWN]:
            _show(make_record(Line(*line)))
        if lost or len(lines) > MOST_SHOWN:
            shown = max(0, len(lines) - MOST_SHOWN)
            log.info("requests_not_shown", count=shown + lost, lost=lost)

    def _write(self, path: Path, lines: list[tuple[Any, ...]]) -> None:
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with path.open("ab") as file:
                file.write(_encode(lines))
                size = file.tell()
            if size > MOST_BYTES:
                path.replace(path.with_name(f"{path.name}.1"))
        except OSError as error:
            if not self._failing:
                log.warning("request_log_unwritable", file=str(path), reason=error.strerror)
            self._failing = True
        else:
            self._failing = False


_encode = msgspec.json.Encoder().encode_lines


def _as_text(path: str | bytes) -> str:
    return (path if isinstance(path, str) else path.decode("latin-1"))[:_MOST_CHARS]


def _show(record: RequestRecord) -> None:
    fields: dict[str, Any] = {"model": record.model, "key": record.key}
    if record.prompt_tokens or record.completion_tokens:
        fields |= {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "queue_s": round(record.queue_s, 3),
            "first_s": round(record.first_s, 3),
        }
    if record.failed:
        fields["outcome"] = record.outcome
    log.info(
        "request_finished",
        status=record.status,
        endpoint=record.endpoint,
        total_s=round(record.total_s, 3),
        request=record.id,
        **{
            name: value for name, value in fields.items() if value not in ("", 0.0) or name in _KEPT
        },
    )


#: Fields that are shown if they are zero, too.
_KEPT = ("prompt_tokens", "completion_tokens")


#: The recorder of this process.
RECORDER = RequestRecorder()
