"""API keys whose hashes cost next to nothing; those of users take a twentieth of a second each."""

from __future__ import annotations

from unittest import mock

from servekit.config import keys


def new_key(name: str) -> tuple[str, str]:
    """Return a new key of that name, and its hash for the file."""
    with mock.patch.object(keys, "_LN", 1):
        return keys.new_key(name)
