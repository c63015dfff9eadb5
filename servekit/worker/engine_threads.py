"""The threads of an engine: an error that one of them does not catch is the engine's death.

An engine whose loop had ended unnoticed would look like one that makes no progress: its worker
would be replaced only after `stall_timeout_s`.
"""

from __future__ import annotations

import threading
from weakref import WeakSet, ref

from servekit.engines.api.base import Emit, Engine


def start_engine(engine: Engine, emit: Emit) -> None:
    """Start an engine. An error that escapes from a thread that this starts becomes its `fatal`."""
    dying = ref(engine)
    before, started = WeakSet(threading.enumerate()), None
    report_others = threading.excepthook

    def on_uncaught(uncaught: threading.ExceptHookArgs) -> None:
        thread, current = uncaught.thread, dying()
        is_ours = thread not in before if started is None else thread in started
        if current is None or not is_ours:
            report_others(uncaught)
        elif current.fatal is None:
            current.fatal = uncaught.exc_value

    threading.excepthook = on_uncaught
    engine.start(emit)
    # one that has died by now was judged by `before`
    started = WeakSet(threading.enumerate()) - before
