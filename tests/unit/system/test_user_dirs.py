"""The user's folders, by the environment that is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.system.user_dirs import find_cache_home, find_engines_folder, find_models_cache


def test_each_folder_is_where_the_environment_says() -> None:
    environ = {"HOME": "/home/ann", "XDG_CACHE_HOME": "/cache", "XDG_DATA_HOME": "/data"}
    assert find_cache_home(environ) == Path("/cache")
    assert find_models_cache(environ) == Path("/cache/servekit/models")
    assert find_engines_folder(environ) == Path("/data/servekit/engines")


@pytest.mark.parametrize("value", [None, "", "relative/folder", "./cache"])
def test_a_path_that_is_not_absolute_counts_as_none(value: str | None) -> None:
    """As the specification of these variables says."""
    names = () if value is None else ("XDG_CACHE_HOME", "XDG_DATA_HOME")
    environ = {"HOME": "/home/ann", **{name: str(value) for name in names}}
    assert find_cache_home(environ) == Path("/home/ann/.cache")
    assert find_models_cache(environ) == Path("/home/ann/.cache/servekit/models")
    assert find_engines_folder(environ) == Path("/home/ann/.local/share/servekit/engines")


def test_without_a_home_the_system_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    home = Path("~").expanduser()
    assert home.is_absolute()
    assert find_cache_home({}) == home / ".cache"
    assert find_engines_folder({}) == home / ".local/share/servekit/engines"
