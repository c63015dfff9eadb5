"""The user's folders; source: XDG base directory specification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def find_cache_home(environ: Mapping[str, str]) -> Path:
    """Return XDG_CACHE_HOME, or ~/.cache."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return base if base.is_absolute() else Path(environ.get("HOME", "~")).expanduser() / ".cache"


def find_models_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of fetched and converted models."""
    return find_cache_home(environ) / "servekit" / "models"


def find_engines_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the environments that `servekit engine install` makes.

    It is below XDG_DATA_HOME, or ~/.local/share.
    """
    base = Path(environ.get("XDG_DATA_HOME", ""))
    if not base.is_absolute():
        base = Path(environ.get("HOME", "~")).expanduser() / ".local" / "share"
    return base / "servekit" / "engines"
