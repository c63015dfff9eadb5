"""Profiles of a file: one is served alone, and a switch to another loses no request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.protocol.messages import Accepted, SetProfile
from servekit.supervisor.admin.control_socket import query_supervisor
from tests.integration.instance import Instance, echo, write_config
from tests.integration.made_up_gpus import MadeUpGpus, on_gpu
from tests.polling import poll

#: With 12 tokens, a request takes 1.2 s.
SLOW: dict[str, Any] = {"slots": 1, "step_s": 0.1}
#: `both` is in either profile, and `later` is loaded by its first request.
MODELS = [
    echo("code"),
    echo("prose", **SLOW),
    echo("both"),
    echo("later") | {"load": "on_demand"},
]
PROFILES = {"profiles": {"coding": ["code", "both", "later"], "writing": ["prose", "both"]}}
REFUSED = "is not in the profile 'coding', which is in force"


def ask(url: str, model: str, tokens: int = 12) -> httpx.Response:
    body = {"model": model, "prompt": "a b c ", "max_tokens": tokens}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def tiers(instance: Instance) -> dict[str, str]:
    """Return each model's tier; of one that stays loaded, its worker's state."""
    found = {}
    for model in instance.status().models:
        state = next((replica.state for replica in model.replicas), "stopped")
        found[model.name] = str(model.residence.tier) if model.residence else state
    return found


def listed(url: str) -> list[str]:
    return [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    with Instance.up(tmp_path, MODELS, "--profile", "writing", sections=PROFILES) as instance:
        instance.until_settled()
        yield instance


def test_a_switch_answers_what_was_asked_and_refuses_the_rest(instance: Instance) -> None:
    url = instance.url
    assert tiers(instance) == {
        "code": "stopped", "prose": "ready", "both": "ready", "later": "stopped",
    }  # fmt: skip
    assert listed(url) == ["prose", "both"]
    refused = ask(url, "code")
    assert refused.status_code == 503
    assert "'code' is not in the profile 'writing'" in refused.json()["error"]["message"]
    assert ask(url, "").json()["model"] == "prose"  # the first that is served
    kept = instance.model("both").replicas[0].pid
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, url, "prose") for _ in range(4)]
        poll("all but the first wait", lambda: waiting(url, "prose") == 3)
        control, switch = instance.run_dir / "control.sock", SetProfile("coding")
        told = asyncio.run(query_supervisor(control, switch))
        late = ask(url, "prose")
        assert waiting(url, "prose")
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(one.json()["usage"]["completion_tokens"] == 12 for one in answers)
    assert late.status_code == 503
    assert "'prose' " + REFUSED in late.json()["error"]["message"]
    assert told == Accepted("the profile 'coding' is in force; not in it: prose")
    instance.until("it is unloaded", lambda: tiers(instance)["prose"] == "stopped", within_s=30)
    assert tiers(instance)["code"] == "ready"
    assert instance.model("both").replicas[0].pid == kept
    assert listed(url) == ["code", "both", "later"]
    assert ask(url, "later").status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 200
    assert "profile coding" in instance.run("ps").stdout
    assert httpx.post(f"{url}/admin/profile/all").status_code == 403  # there is no admin's key
    load = instance.run("load", "prose")
    assert (load.returncode, load.stderr.strip()) == (1, f"prose {REFUSED}")


def waiting(url: str, model: str) -> int:
    return int(httpx.get(f"{url}/readyz").json()["models"][model]["waiting"])


@pytest.mark.lane("long")
def test_a_profile_stays_over_reloads_and_a_crash(tmp_path: Path, instance: Instance) -> None:
    assert instance.run("profile", "coding").returncode == 0
    sections = {"profiles": {"coding": ["code"], "writing": ["prose"]}}
    write_config(tmp_path, MODELS, sections=sections)
    instance.reload()
    instance.until("it is unloaded", lambda: tiers(instance)["both"] == "stopped", within_s=30)
    write_config(tmp_path, MODELS, sections={"profiles": {"writing": ["prose"]}})
    refused = instance.run("reload")
    assert refused.returncode == 2
    assert "the profile 'coding', which is in force, is not in the file" in refused.stderr
    assert "(there are: writing)" in refused.stderr
    unknown = instance.run("profile", "coding")
    assert "no profile is called 'coding'; there are: writing" in unknown.stderr
    write_config(tmp_path, MODELS, sections=sections)
    instance.signal(signal.SIGKILL)
    instance.wait()
    with Instance.up(tmp_path, MODELS, "--profile", "writing", sections=sections) as again:
        again.until_settled()
        assert (again.status().profile, tiers(again)["code"]) == ("coding", "ready")
        assert "the profile is coding again" in again.log
        assert again.run("profile", "all").returncode == 0
        assert again.status().profile == ""
        assert set(tiers(again).values()) == {"ready", "stopped"}  # `later` is stopped
        assert "all" in again.run("profile").stdout
        unknown = again.run("profile", "codin")
        assert unknown.returncode == 2
        assert "did you mean 'coding'?" in unknown.stderr
        assert again.run("down").returncode == 0
    with Instance.up(tmp_path, MODELS, "--profile", "writing", sections=sections) as fresh:
        fresh.until_settled()
        assert fresh.status().profile == "writing"  # the last one ended in order


def test_a_crash_is_survived_where_only_the_profile_in_force_fits(tmp_path: Path) -> None:
    small, large = echo("code") | {"memory": "40%"}, echo("prose") | {"memory": "70%"}
    sections = {"profiles": {"coding": ["code"], "writing": ["prose"]}}
    with Instance.up(tmp_path, [small], sections={"profiles": {"coding": ["code"]}}) as instance:
        instance.until_settled()
        assert instance.run("profile", "coding").returncode == 0
        write_config(tmp_path, [small, large], sections=sections)
        instance.reload()
        instance.signal(signal.SIGKILL)
        instance.wait()
    with Instance.up(tmp_path, [small, large], sections=sections) as again:
        again.until_settled()
        assert (again.status().profile, tiers(again)["code"]) == ("coding", "ready")
        assert again.run("down").returncode == 0
    fresh = Instance(tmp_path, tmp_path / "servekit.yaml")
    assert fresh.wait() == 2
    assert "too much" in fresh.log


def test_profiles_share_a_gpu_that_cannot_hold_both(tmp_path: Path) -> None:
    gpus = MadeUpGpus(tmp_path)
    models = [on_gpu("large", "60GiB", 50.0), on_gpu("wide", "60GiB", 50.0)]
    sections: dict[str, Any] = {"profiles": {"one": ["large"], "two": ["wide"]}}
    given: dict[str, Any] = {"sections": sections, "env": gpus.env}
    with Instance.up(tmp_path, models, "--profile", "one", **given) as instance:
        instance.until_settled()
        for profile, model in (("two", "wide"), ("one", "large")):
            done = instance.run("profile", profile)
            assert done.returncode == 0, done.stderr
            assert tiers(instance)[model] == "ready"
            assert ask(instance.url, model).status_code == 200
        whole = instance.run("profile", "all")
        assert whole.returncode == 2
        assert "GPU" in whole.stderr
        assert ask(instance.url, "large").status_code == 200  # nothing has changed
