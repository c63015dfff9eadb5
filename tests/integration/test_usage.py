"""Usage by key and model: kept across restarts, and the budgets of keys that follow from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.usage_store import Usage, read_usage
from tests.api_keys import new_key
from tests.integration.instance import Instance, bearer, echo, run, write_config
from tests.polling import poll


def ask(instance: Instance, key: str, tokens: int = 5) -> httpx.Response:
    body = {"model": "a", "prompt": "hello", "max_tokens": tokens}
    return httpx.post(f"{instance.url}/v1/completions", json=body, headers=bearer(key))


def until_refused(instance: Instance, key: str) -> httpx.Response:
    answers: list[httpx.Response] = []

    def look() -> bool:
        answers.append(ask(instance, key, 1))
        return answers[-1].is_error

    poll("the budget is used up", look)
    return answers[-1]


@pytest.mark.lane("long")
def test_usage_and_budgets_outlive_a_restart(tmp_path: Path) -> None:
    made = {name: new_key(name) for name in ("alice", "bob", "carol")}
    limits = {"alice": {"daily_tokens": 15}, "bob": {"monthly_tokens": 15}, "carol": {}}
    keys: list[dict[str, Any]] = [
        {"name": name, "hash": line, **limits[name]} for name, (_, line) in made.items()
    ]
    models = [{**echo("a"), "aliases": ["alpha"]}]
    with Instance.up(tmp_path, models, sections={"keys": keys}) as instance:
        instance.until_settled()
        for name, (key, _) in made.items():
            assert ask(instance, key).status_code == 200, name
            assert ask(instance, key).status_code == 200, name
        for name, period in (("alice", "daily"), ("bob", "monthly")):
            key = made[name][0]
            refused = until_refused(instance, key)
            assert refused.status_code == 429
            said = refused.json()["error"]["message"]
            assert f"'{name}' has used up its 15 {period} tokens; they are renewed at " in said
            assert int(refused.headers["retry-after"]) > 0
        assert ask(instance, made["carol"][0]).status_code == 200
        poll(
            "all is written",
            lambda: "carol" in (f := by_key(tmp_path)) and f["carol"].requests == 3,
        )
    before = by_key(tmp_path)
    assert (before["carol"].prompt_tokens, before["carol"].completion_tokens) == (15, 15)
    with Instance.up(tmp_path, models, sections={"keys": keys}) as again:
        again.until_settled()
        refused = until_refused(again, made["alice"][0])
        assert refused.status_code == 429
        keys[0]["daily_tokens"] = 10_000
        write_config(tmp_path, models, sections={"keys": keys})
        assert run("reload", "--run-dir", str(again.run_dir)).returncode == 0
        poll("the new budget holds", lambda: ask(again, made["alice"][0]).is_success)
        poll(
            "that is written, too",
            lambda: by_key(tmp_path)["alice"].requests > before["alice"].requests,
        )
    check_output(tmp_path)


def by_key(folder: Path) -> dict[str, Usage]:
    return {row.key: row for row in read_usage(folder / "run", by=("key",))}


def check_output(folder: Path) -> None:
    """The same in CSV, JSON and columns."""
    here = ("--run-dir", str(folder / "run"))
    done = run("usage", *here, "--by", "key", "--month", "--csv")
    head, *lines = done.stdout.splitlines()
    assert head.startswith("period,key,model,requests,prompt_tokens")
    assert [line.split(",")[1] for line in lines] == ["alice", "bob", "carol"]
    rows = json.loads(run("usage", *here, "--by", "model", "--json").stdout)
    assert {row["model"] for row in rows} == {"a"}
    assert "carol" in run("usage", *here).stdout
    assert "not 'user'" in run("usage", *here, "--by", "user").stderr
