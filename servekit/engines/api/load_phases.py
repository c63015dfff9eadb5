"""Where the time of a load goes: who does something that takes a while says what.

    with phase("weights"):
        ...

A phase that begins within another is a part of it, in a thread that inherits its context as
`asyncio.to_thread` has it, too.

A process loads one model, so who hears of it is the module's own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from servekit.errors import ServekitError
from servekit.protocol.startup_messages import Phase

_LONGEST_WHY = 300

Hear = Callable[[Phase], None]

_within: ContextVar[str] = ContextVar("within", default="")
_hear: Hear | None = None


def heard_by(hear: Hear | None) -> None:
    """Have `hear` called at the beginning and the end of each phase, in the thread it runs in."""
    global _hear
    _hear = hear


@contextlib.contextmanager
def phase(name: str, *, lacks: type[Exception] | None = None) -> Iterator[None]:
    """What is done in this context is a phase of that name.

    An error of the kind `lacks` says that there is no such thing here, which is no failure.
    """
    within, began_s = _within.get(), time.monotonic()
    _tell(Phase(name, began_s, None, within))
    token, failed, why = _within.set(name), False, ""
    try:
        yield
    except BaseException as error:
        failed = lacks is None or not isinstance(error, lacks)
        why = _why(error) if failed else str(error)[:_LONGEST_WHY] or "not here"
        raise
    finally:
        _within.reset(token)
        _tell(Phase(name, began_s, time.monotonic(), within, failed, why))


def _why(error: BaseException) -> str:
    """In one line; a compiler's own errors have pages."""
    kind = "" if isinstance(error, ServekitError) else type(error).__name__
    first = next(iter(str(error).splitlines()), "")
    return ": ".join(filter(None, (kind, first)))[:_LONGEST_WHY]


def _tell(of: Phase) -> None:
    if _hear is not None:
        _hear(of)
