"""The installed files of servekit, which an upgrade may replace while an instance runs."""

from __future__ import annotations

import os
import sys

import servekit

#: Environment variable of a child: the protocol of the supervisor that has started it.
PROTOCOL_VARIABLE = "SERVEKIT_PROTOCOL"
UPGRADED = "servekit was upgraded while this instance ran: restart the instance"


def _identify() -> tuple[int, int, int]:
    try:
        found = os.stat(servekit.__file__)  # noqa: PTH116
    except OSError:  # between the removal of the old version and the arrival of the new one
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


_AT_START = _identify()


def was_upgraded() -> bool:
    """Return whether the files are no longer those that this process has started from."""
    return _identify() != _AT_START


def require_protocol(own: int) -> None:
    """Exit with a sentence if the supervisor that started this process speaks another protocol."""
    theirs = os.environ.get(PROTOCOL_VARIABLE, str(own))
    if theirs != str(own):
        sys.exit(f"it speaks protocol {own}, and its supervisor {theirs}. {UPGRADED}")
