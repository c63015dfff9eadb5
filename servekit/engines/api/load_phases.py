"""Timing of the phases of a load. Code that takes long names its phase:

    with phase("weights"):
        ...

A phase that begins within another is a part of it, also in a thread that inherits the context, as
with `asyncio.to_thread`.

A process loads one model, so the listener is a module global.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from servekit.errors import ServekitError
from servekit.protocol.control.startup_messages import Phase

_LONGEST_WHY = 300

Hear = Callable[[Phase], None]

_within: ContextVar[str] = ContextVar("within", default="")
_hear: Hear | None = None


def heard_by(hear: Hear | None) -> None:
    """Set the callback for the beginning and end of each phase, called in the phase's thread."""
    global _hear
    _hear = hear


@contextlib.contextmanager
def phase(name: str, *, lacks: type[Exception] | None = None, file: str = "") -> Iterator[None]:
    """Report the code in this context as a phase called `name`.

    `file` is what it reads by a library that may end the process: it is known before. An error of
    type `lacks` means that an optional feature is missing here, which is no failure.
    """
    within, began_s = _within.get(), time.monotonic()
    _tell_listener(Phase(name, began_s, None, within, file=file))
    token, failed, why = _within.set(name), False, ""
    try:
        yield
    except BaseException as error:
        failed = lacks is None or not isinstance(error, lacks)
        why = _explain_error(error) if failed else str(error)[:_LONGEST_WHY] or "not here"
        raise
    finally:
        _within.reset(token)
        _tell_listener(Phase(name, began_s, time.monotonic(), within, failed, why, file))


def _explain_error(error: BaseException) -> str:
    """Return the error in one line; errors of compilers are pages long."""
    kind = "" if isinstance(error, ServekitError) else type(error).__name__
    first = next(iter(str(error).splitlines()), "")
    return ": ".join(filter(None, (kind, first)))[:_LONGEST_WHY]


def _tell_listener(of: Phase) -> None:
    if _hear is not None:
        _hear(of)
