"""The plan of a file, and the wait for the end of its writing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import ConfigError
from servekit.supervisor.deployments import plan as module
from servekit.supervisor.deployments.plan import Source
from servekit.supervisor.scheduling.memory_requests import Misplaced


def write(folder: Path, *models: dict[str, Any], **more: Any) -> Path:
    path = folder / "servekit.yaml"
    path.write_text(json.dumps({"models": models or [echo("a")], **more}))
    return path


def echo(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "path": name, "engine": "echo", **keys}


def age(path: Path, by_s: float) -> None:
    at = time.time() - by_s
    os.utime(path, (at, at))


def test_a_plan_has_a_place_for_each_worker(tmp_path: Path) -> None:
    path = write(tmp_path, echo("a", replicas=2), echo("b"))
    plan = Source(path).plan(())
    assert [place.name for place in plan.places] == ["a/0", "a/1", "b/0"]
    assert plan.config_path == str(path.resolve())


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, server={"port": 1234, "drain_timeout_s": 5})
    server = Source(path, {"port": 4321}).plan(()).config.server
    assert (server.port, server.drain_timeout_s) == (4321, 5)


def test_a_public_host_needs_keys_unless_it_is_wanted(tmp_path: Path) -> None:
    path = write(tmp_path, server={"host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"server\.host"):
        Source(path).plan(())
    assert Source(path, insecure=True).plan(()).places
    assert Source(path, {"host": "127.0.0.1"}).plan(()).places


def test_a_key_that_the_environment_lacks_is_told_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, keys=[{"name": "k", "environment": "NOT_THERE"}])
    with pytest.raises(ConfigError, match="NOT_THERE"):
        Source(path, environ={}).plan(())
    assert Source(path, environ={"NOT_THERE": "s" * 32}).plan(()).access.keys


def test_scaled_up_replicas_are_kept_and_given_up_where_they_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(write(tmp_path, echo("a", replicas={"min": 1, "max": 4})))
    assert len(source.plan((), counts={"a": 3}).places) == 3
    checked: list[int] = []

    def check(models: Any, places: Any, total_bytes: int) -> None:
        checked.append(len(places))
        if len(places) > 1:
            raise Misplaced("too many", "models")

    monkeypatch.setattr(module, "check_host_memory", check)
    assert len(source.plan((), counts={"a": 3}).places) == 1
    assert checked == [3, 1]
    with pytest.raises(ConfigError, match="too many"):
        Source(write(tmp_path, echo("a", replicas=2))).plan(())


def test_only_models_of_the_profile_get_a_place(tmp_path: Path) -> None:
    profiles = {"one": ["b"], "two": ["a", "b"]}
    path = write(tmp_path, echo("a"), echo("b"), profiles=profiles)
    plan = Source(path, profile="one").plan(())
    assert [place.name for place in plan.places] == ["b/0"]
    assert [model.load for model in plan.config.models] == ["manual", "on_start"]
    assert (plan.left_out_by("a"), plan.left_out_by("b")) == ("one", "")
    assert not Source(path).plan(()).left_out_by("a")
    assert len(Source(path, profile="two").plan(()).places) == 2
    with pytest.raises(ConfigError, match="'on'; there are: one, two; did you mean 'one'"):
        Source(path, profile="on").plan(())


def test_a_model_of_a_profile_that_does_not_fit_is_blamed_at_its_own_line(tmp_path: Path) -> None:
    wide = echo("b", device="cuda")
    path = write(tmp_path, echo("a"), wide, profiles={"one": ["b"]})
    with pytest.raises(ConfigError, match=r"models\[1\].device"):
        Source(path, profile="one").plan(())


def test_workers_of_a_cluster_have_places_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, echo("a", replicas=2), launcher="ray", ray={"cpus": 3})
    plan = Source(path).plan(())
    assert [place.threads for place in plan.places] == [3, 3]
    assert plan.gpus == ()


# ---------------------------------------------------------------- at rest


@pytest.mark.parametrize("by_s", [60.0, -60.0], ids=["old", "from the future"])
def test_a_file_at_rest_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    path = write(tmp_path)
    age(path, by_s)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    Source(path).await_rest()


def test_a_missing_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    Source(tmp_path / "gone.yaml").await_rest()


def test_a_file_that_was_just_written_is_left_alone_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    slept: list[float] = []

    def sleep(for_s: float) -> None:
        slept.append(for_s)
        age(path, 0.2 * len(slept))

    monkeypatch.setattr(time, "sleep", sleep)
    Source(path).await_rest()
    assert len(slept) == 3 and all(0 < for_s <= 0.05 for for_s in slept)


def test_a_file_that_is_always_being_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(time, "sleep", lambda _: path.touch())
    with pytest.raises(ConfigError, match="is still being written"):
        Source(path).await_rest()
