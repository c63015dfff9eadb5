"""`servekit load`, `sleep`, `restart`, `profile` and their kin, before a made-up instance."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.cli import models
from servekit.protocol.messages import (
    Accepted,
    Progress,
    Refused,
    Restart,
    SetProfile,
    Status,
    ToSupervisor,
)
from servekit.protocol.residency import ResidencyStatus, SetResidency
from tests.polling import poll_async
from tests.unit.cli.instance import invoke, listening, make_model, make_replica, make_status


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_LOOK_EVERY_S", 0.01)


def accept(message: ToSupervisor) -> Accepted:
    return Accepted("m is loaded")


@pytest.mark.parametrize("want", ["load", "unload", "sleep", "wake"])
def test_the_end_is_awaited_and_timed(tmp_path: Path, want: str) -> None:
    with listening(tmp_path, accept) as heard:
        done = invoke(want, "m", run_dir=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert re.fullmatch(r"m is loaded after \d+\.\d s\n", done.stdout)
    assert heard == [SetResidency("m", want, wait=True)]  # type: ignore[arg-type]


def test_with_no_wait_nothing_is_timed(tmp_path: Path) -> None:
    with listening(tmp_path, accept) as heard:
        done = invoke("load", "m", "--no-wait", run_dir=tmp_path)
        again = invoke("restart", "m/0", "--no-wait", run_dir=tmp_path)
    assert done.stdout == again.stdout == "m is loaded\n"
    assert heard == [SetResidency("m", "load", wait=False), Restart("m/0", wait=False)]


def test_what_is_so_already_took_no_time(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: Accepted("m is already loaded")):
        assert invoke("load", "m", run_dir=tmp_path).stdout == "m is already loaded\n"


def test_a_restart_is_awaited_and_timed(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: Accepted("m: 1 worker replaced")) as heard:
        done = invoke("restart", "m", run_dir=tmp_path)
    assert re.fullmatch(r"m: 1 worker replaced after \d+\.\d s\n", done.stdout)
    assert heard == [Restart("m", wait=True)]


@pytest.mark.parametrize(("invalid", "code"), [(True, 2), (False, 1)])
def test_a_refusal_is_told_with_its_exit_code(tmp_path: Path, invalid: bool, code: int) -> None:
    with listening(tmp_path, lambda message: Refused("no such model", invalid)):
        done = invoke("unload", "x", run_dir=tmp_path)
    assert (done.exit_code, done.stderr, done.stdout) == (code, "no such model\n", "")


def coming(model: str, progress: Progress | None, reason: str = "") -> Status:
    found = replace(make_replica(f"{model}/0", "loading"), progress=progress)
    residence = ResidencyStatus("on_demand", "coming", reason)
    named = replace(make_model(model, found), aliases=("alias",), residence=residence)
    return make_status(make_model("other"), named)


def test_a_model_that_stays_has_no_progress() -> None:
    assert models._describe_progress(make_model("m")) == ""
    assert models._describe_progress(None) == ""


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (coming("m", Progress("load", 30, 272, "tensors")), "loading, load 30 of 272 tensors"),
        (coming("m", None, "waits for memory"), "loading, waits for memory"),
        (coming("m", None), "loading"),
    ],
)
def test_progress_goes_to_stderr_once(tmp_path: Path, status: Status, told: str) -> None:
    looks: list[Status] = []

    def look() -> Status:
        looks.append(status)
        return status

    async def answer() -> Accepted:
        await poll_async("the command has looked twice", lambda: len(looks) > 1)
        return Accepted("done")

    with listening(tmp_path, lambda message: answer(), look):
        done = invoke("load", "alias", run_dir=tmp_path)
    assert done.stderr == f"alias: {told}\n"
    assert done.stdout.startswith("done after ")


PROFILES = {"day": ("m",), "night": ("m", "n")}


def test_without_a_name_the_profiles_are_listed(tmp_path: Path) -> None:
    status = replace(make_status(make_model("m"), make_model("n")), profiles=PROFILES)
    for in_force, marked in (("", "all"), ("night", "night")):
        with listening(tmp_path, accept, replace(status, profile=in_force)) as heard:
            done = invoke("profile", run_dir=tmp_path)
        head, *lines = (line.split() for line in done.stdout.splitlines())
        assert head == ["PROFILE", "IN", "FORCE", "MODELS"]
        assert [line[0] for line in lines] == ["all", "day", "night"]
        assert [line[0] for line in lines if line[1] == "yes"] == [marked]
        assert lines[0][-2:] == ["m,", "n"] and lines[1][-1] == "m"
        assert heard == []


def test_a_switch_is_awaited_unless_told_otherwise(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: Accepted("the profile is day")) as heard:
        done = invoke("profile", "day", run_dir=tmp_path)
        at_once = invoke("profile", "day", "--no-wait", run_dir=tmp_path)
    assert heard == [SetProfile("day"), SetProfile("day")]
    assert re.fullmatch(r"the profile is day\nready after \d+\.\d s\n", done.stdout)
    assert at_once.stdout == "the profile is day\n"


def test_a_switch_ends_once_no_model_changes_and_all_are_loaded(tmp_path: Path) -> None:
    changing = make_status(replace(make_model("m"), changing=True))
    loading = make_status(make_model("m", make_replica("m/0", "loading")))
    news = [changing, loading, make_status()]
    with listening(tmp_path, accept, lambda: news.pop(0)):
        done = invoke("profile", "day", run_dir=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert news == []


def test_a_switch_names_the_models_that_have_failed(tmp_path: Path) -> None:
    ill = replace(make_replica("n/0", "failed"), reason="no such folder")
    elsewhere = replace(make_replica("o/0", "failed"), reason="of another profile")
    left_out = replace(make_model("o", elsewhere), left_out="day")
    status = make_status(make_model("m"), make_model("n", ill), left_out)
    with listening(tmp_path, lambda message: Accepted("the profile is day"), status):
        done = invoke("profile", "day", run_dir=tmp_path)
    assert (done.exit_code, done.stderr) == (1, "n/0: no such folder\n")
    assert "ready after" not in done.stdout
