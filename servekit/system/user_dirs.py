"""The user's folders; source: XDG base directory specification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def find_cache_home(environ: Mapping[str, str]) -> Path:
    """Return XDG_CACHE_HOME, or ~/.cache."""
    return _find_base(environ, "XDG_CACHE_HOME", ".cache")


def find_config_home(environ: Mapping[str, str]) -> Path:
    """Return XDG_CONFIG_HOME, or ~/.config."""
    return _find_base(environ, "XDG_CONFIG_HOME", ".config")


def find_models_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of fetched and converted models."""
    return find_cache_home(environ) / "servekit" / "models"


def find_engines_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the environments that `servekit engine install` makes.

    It is below XDG_DATA_HOME, or ~/.local/share.
    """
    return _find_base(environ, "XDG_DATA_HOME", ".local/share") / "servekit" / "engines"


def _find_base(environ: Mapping[str, str], variable: str, below_home: str) -> Path:
    base = Path(environ.get(variable, ""))
    return base if base.is_absolute() else Path(environ.get("HOME", "~")).expanduser() / below_home
