"""Prefetch of a model's files while its engine is imported.

The fetch waits for network and disk, the import uses a core. Conversions run after all imports,
because two threads that import the same libraries may see a half-imported module.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import structlog

from servekit.engines.api.base import Report
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

log: Any = structlog.get_logger(__name__)

#: Fetches in progress, by path and revision; a process loads one model.
_fetching: dict[tuple[str, str | None], Future[None]] = {}


def begin_fetch(spec: WorkerSpec, report: Report, *, converts: bool) -> None:
    """Fetch the model's files in a thread; with `converts` a GGUF file's conversion is loaded."""
    import_libraries(spec.path)
    outcome: Future[None] = Future()
    _fetching[spec.path, spec.revision] = outcome
    threading.Thread(
        target=_fetch_files, args=(spec, report, converts, outcome), name="fetch", daemon=True
    ).start()


def await_fetch(path: str, revision: str | None) -> None:
    """Wait for a fetch, if one was begun. Raises its LoadError, once."""
    if (outcome := _fetching.pop((path, revision), None)) is not None:
        outcome.result()


def import_libraries(path: str) -> None:
    """Import the thread's libraries in the calling thread, which imports parts of them later."""
    from servekit.engines.model_files import hub, source

    if isinstance(source.parse_source(path, exists=Path(path).expanduser().exists()), source.Hub):
        hub.import_library()


def _fetch_files(spec: WorkerSpec, report: Report, converts: bool, outcome: Future[None]) -> None:
    from servekit.engines.model_files.source import fetch_source

    try:
        fetch_source(spec.path, spec.revision, report, converts=converts)
    except LoadError as error:
        outcome.set_exception(error)
    except BaseException as error:  # resolving the path raises it again, where it is handled
        log.warning("prefetch_failed", reason=repr(error))
        outcome.set_result(None)
    else:
        outcome.set_result(None)
