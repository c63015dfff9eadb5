"""The request log of an instance: a JSON array for each HTTP request, in its run directory.

    requests/gateway-0.jsonl       of each gateway of this machine, written once a second
    requests/gateway-0.jsonl.1     the file before; older ones are removed

Gateways write (`servekit.gateway.telemetry.request_recorder`), and any process that may read the
run directory reads, with or without a running instance. No prompt and no answer is in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

FOLDER = "requests"
#: The largest size of a file; two are kept, about 80,000 requests.
MOST_BYTES = 8 * 2**20


class Line(NamedTuple):
    """A line of the file. Fields are only ever added at the end.

    Times but `at` are of a monotonic clock, in s, and 0 for what did not happen: a gateway writes
    what it has, and readers reckon.
    """

    at: float  # when it ended: Unix time, s
    id: str
    endpoint: str
    status: int
    key: str
    began_s: float
    ended_s: float
    #: Of its calls: model, key, outcome, prompt, cached and completion tokens, and the times of the
    #: first start and the first token; None if no model was asked.
    calls: tuple[str, str, str, int, int, int, float, float] | None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request, at its end."""

    at: float  # when it ended: Unix time, s
    id: str
    endpoint: str  # the path
    status: int  # 499: the client left before the answer was complete
    total_s: float  # from its head to the end of its answer
    key: str = ""
    model: str = ""
    outcome: str = ""  # "stop", "length", or the code of an error; "" if no model was asked
    prompt_tokens: int = 0  # cached ones included; of all its choices
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    first_s: float = 0.0  # from its head to the first token

    @property
    def failed(self) -> bool:
        """Return whether the client got an error, be it within a stream that had begun."""
        return self.status >= 400 or self.outcome not in ("", "stop", "length")


_decode = msgspec.json.Decoder(Line).decode
_NO_CALLS = ("", "", "", 0, 0, 0, 0.0, 0.0)


def make_record(line: Line) -> RequestRecord:
    model, key, outcome, prompt, cached, completion, started_s, first_s = line.calls or _NO_CALLS
    return RequestRecord(
        at=line.at,
        id=line.id,
        endpoint=line.endpoint,
        status=line.status,
        total_s=round(line.ended_s - line.began_s, 4),
        key=key or line.key,
        model=model,
        outcome=outcome,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        queue_s=_since(line.began_s, started_s),
        first_s=_since(line.began_s, first_s),
    )


def _since(began_s: float, at_s: float) -> float:
    return round(max(0.0, at_s - began_s), 4) if at_s else 0.0


def file_of(run_dir: Path, gateway: str) -> Path:
    """Return the file of a gateway, such as gateway/0."""
    return run_dir / FOLDER / f"{gateway.replace('/', '-')}.jsonl"


def find_files(run_dir: Path) -> list[Path]:
    """Return the current file of each gateway."""
    return sorted((run_dir / FOLDER).glob("*.jsonl"))


def read_records(run_dir: Path) -> list[RequestRecord]:
    """Return all records, the oldest first; lines that are damaged are left out."""
    found: list[RequestRecord] = []
    for path in (run_dir / FOLDER).glob("*.jsonl*"):
        try:
            lines = path.read_bytes().splitlines()
        except OSError:  # replaced at this moment
            continue
        found += parse_lines(lines)
    return sorted(found, key=lambda record: record.at)


def read_latest(run_dir: Path, most_bytes: int) -> list[RequestRecord]:
    """Return the last records, the newest first.

    `most_bytes` are read at most, of all gateways together.
    """
    written = (run_dir / FOLDER).glob("*.jsonl*")
    files = {path.with_name(path.name.removesuffix(".1")) for path in written}
    found: list[RequestRecord] = []
    for path in files:
        left = most_bytes // len(files)
        for one in (path, path.with_name(f"{path.name}.1")):
            data = _read_end(one, left)
            left -= len(data)
            found += parse_lines(data.splitlines())
    return sorted(found, key=lambda record: record.at, reverse=True)


def find_version(run_dir: Path) -> list[tuple[str, int]]:
    """Return a value that changes with each file of the log."""
    with contextlib.suppress(OSError):  # replaced at this moment, or absent
        entries = [*os.scandir(run_dir / FOLDER)]
        return sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries)
    return []


def _read_end(path: Path, most_bytes: int) -> bytes:
    """Return the whole lines among the last bytes of a file; none if it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError:  # replaced at this moment, or absent
        return b""
    return data if size <= most_bytes else data.partition(b"\n")[2]


def parse_lines(lines: list[bytes]) -> Iterator[RequestRecord]:
    for line in lines:
        try:
            yield make_record(_decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):  # cut by a crash, or of another version
            continue
