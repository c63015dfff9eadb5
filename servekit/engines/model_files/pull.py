"""`servekit pull` in a process of its own, run with `python -m`; prints lines of JSON.

{"total": BYTES}                        before it starts, if the source states its size
{"phase": …, "done": …, "total": …}     progress
{"path": …} or {"error": …}             the end
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from servekit.engines.model_files import hub, source
from servekit.errors import LoadError
from servekit.protocol.messages import Progress

_TIMEOUT_S = 10.0


def pull(path: str, revision: str | None) -> None:
    """Fetch the files of a model, and convert nothing: the engine does that at its first start."""
    what = source.parse_source(path)
    if isinstance(what, source.Hub):
        with contextlib.suppress(LoadError):  # the fetch itself reports it
            sizes, files, _ = hub.list_wanted(what.repo, what.file, revision, _TIMEOUT_S)
            _tell(total=sum(sizes[name] for name in files))
    source.fetch_source(path, revision, _report, converts=False)


def _report(progress: Progress) -> None:
    _tell(phase=progress.phase, done=progress.done, total=progress.total)


def _tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    path, revision = sys.argv[1:3]
    try:
        pull(path, revision or None)
    except LoadError as error:
        _tell(error=error.message)
        raise SystemExit(1) from None
    _tell(path=path)


if __name__ == "__main__":
    main()
