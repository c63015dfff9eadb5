"""The installed servekit: its package, and its files, which an upgrade may replace meanwhile."""

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


def is_slim() -> bool:
    """Return whether this is the package of `deploy/slim`, whose engines have environments."""
    return bool(package_version("servekit-slim"))


def package_version(package: str) -> str:
    """Return the version of a package in servekit's own environment; "" if pip has none of it."""
    from importlib import metadata  # a slow import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def make_pip_command(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    return f"pip install 'servekit{'-slim' if is_slim() else ''}[{extra}]'"
