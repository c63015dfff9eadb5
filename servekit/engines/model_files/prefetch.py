"""The files of a model, fetched while its engine is imported: one waits for the network and the
disk, the other for a core.

Only fetched: what has to be converted first is converted when all is imported, since two threads
that import the same libraries may meet half of one.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path

from servekit.engines.api.base import Report
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

log = logging.getLogger(__name__)

#: A process loads one model: what is fetched, by its path and revision.
_fetching: dict[tuple[str, str | None], Future[None]] = {}


def begin(spec: WorkerSpec, report: Report, *, converts: bool) -> None:
    """Fetch the model's files in a thread; `converts`: of a GGUF file its conversion is loaded."""
    import_libraries(spec.path)
    outcome: Future[None] = Future()
    _fetching[spec.path, spec.revision] = outcome
    threading.Thread(
        target=_fetch, args=(spec, report, converts, outcome), name="fetch", daemon=True
    ).start()


def settle(path: str, revision: str | None) -> None:
    """Wait for it, if it was begun. Raises the LoadError that it met, once."""
    if (outcome := _fetching.pop((path, revision), None)) is not None:
        outcome.result()


def import_libraries(path: str) -> None:
    """What the thread needs is imported in the caller's, which imports more of the same later."""
    from servekit.engines.model_files import hub, source

    if isinstance(source.parse(path, exists=Path(path).expanduser().exists()), source.Hub):
        hub.import_library()


def _fetch(spec: WorkerSpec, report: Report, converts: bool, outcome: Future[None]) -> None:
    from servekit.engines.model_files.source import fetch

    try:
        fetch(spec.path, spec.revision, report, converts=converts)
    except LoadError as error:
        outcome.set_exception(error)
    except BaseException as error:  # who resolves the path meets it again, and knows what to do
        log.warning("not fetched ahead: %r", error)
        outcome.set_result(None)
    else:
        outcome.set_result(None)
