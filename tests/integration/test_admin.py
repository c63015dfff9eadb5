"""Administration over HTTP on a real instance: it says and does what the command line does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.errors import LONGEST_MESSAGE
from tests.api_keys import new_key
from tests.integration.instance import Instance, bearer, echo, run, write_config
from tests.integration.test_access import PLAIN
from tests.polling import poll

pytestmark = pytest.mark.timeout(120)

ROOT, ROOT_HASH = new_key("root")
USER, USER_HASH = new_key("user")
KEYS: list[dict[str, Any]] = [
    {"name": "root", "hash": ROOT_HASH, "admin": True, "models": ["a"]},
    {"name": "user", "hash": USER_HASH},
]
ENDPOINTS = [
    *(("GET", "/admin/status"), ("GET", "/admin/why/a")),
    *(("POST", "/admin/reload"), ("POST", "/admin/profile/few"), ("POST", "/admin/profile/all")),
]
FORBIDDEN = (403, "forbidden", "permission_error")


def ask(
    instance: Instance, method: str, path: str, key: str = ROOT, *, url: str = ""
) -> httpx.Response:
    """On a connection of its own, so at either gateway."""
    headers = bearer(key) if key else {}
    return httpx.request(method, f"{url or instance.url}{path}", headers=headers, timeout=30)


def told(instance: Instance, *args: str) -> Any:
    """What the command line says of it, for programs."""
    return json.loads(run(*args, "--json", "--run-dir", str(instance.run_dir)).stdout)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["type"]


def test_administration(tmp_path: Path) -> None:
    """Two gateways, an admin's key and another."""
    models, server = [echo("a"), echo("b")], {"gateways": 2}
    with Instance.up(tmp_path, models, server=server, sections={"keys": KEYS}) as instance:
        url = instance.until_settled().url
        both_answer(instance, url)
        says_what_the_command_line_says(instance)
        only_admins_may(instance)
        a_good_file_is_taken(tmp_path, instance, models, server)
        a_bad_file_changes_nothing(tmp_path, instance)
        assert "unexpected_error" not in instance.log


def both_answer(instance: Instance, url: str) -> None:
    """Either gateway has logged a reload that it was asked for."""

    def asked() -> bool:
        done = ask(instance, "POST", "/admin/reload", url=url)
        assert (done.status_code, done.json()) == (200, {"message": "nothing to change"})
        logs = [
            (instance.run_dir / "logs" / f"gateway-{index}.log").read_text() for index in (0, 1)
        ]
        return all("reload_requested" in log for log in logs)

    poll("both gateways were asked", asked, 30)


def says_what_the_command_line_says(instance: Instance) -> None:
    status = ask(instance, "GET", "/admin/status").json()
    shown = told(instance, "ps")
    assert status.keys() == shown.keys()
    for key in ("version", "pid", "url", "config", "started_at", "draining"):
        assert status[key] == shown[key]
    assert [model["name"] for model in status["models"]] == ["a", "b"]  # not only its own
    assert [gateway["name"] for gateway in status["gateways"]] == ["gateway/0", "gateway/1"]
    pids = [model["replicas"][0]["pid"] for model in shown["models"]]
    assert [model["replicas"][0]["pid"] for model in status["models"]] == pids
    for name in ("a", "b/0", "gateway/1"):
        why, by_command = (
            ask(instance, "GET", f"/admin/why/{name}").json(),
            told(instance, "why", name),
        )
        assert why.keys() == by_command.keys()
        assert (why["model"], why["breaker"]) == (by_command["model"], "closed")
        names = [replica["name"] for replica in by_command["replicas"]]
        assert names and [replica["name"] for replica in why["replicas"]] == names
    unknown = ask(instance, "GET", "/admin/why/nope")
    assert refusal(unknown) == (404, "not_found", "not_found_error")
    assert unknown.json()["error"]["message"] == said(instance, "why", "nope")


def said(instance: Instance, *args: str) -> str:
    """The sentence with which the command line refuses."""
    done = run(*args, "--run-dir", str(instance.run_dir))
    assert done.returncode == 2
    return done.stderr.strip()


def only_admins_may(instance: Instance) -> None:
    for method, path in ENDPOINTS:
        refused = ask(instance, method, path, USER)
        assert refusal(refused) == FORBIDDEN
        assert "admin: true" in refused.json()["error"]["message"]
        for key in ("", "wrong"):
            assert refusal(ask(instance, method, path, key))[:2] == (401, "invalid_api_key")


def a_good_file_is_taken(
    folder: Path, instance: Instance, models: list[dict[str, Any]], server: dict[str, Any]
) -> None:
    pid = instance.replica("a/0").pid
    write_config(folder, [*models, echo("c")], server, {"keys": KEYS})
    done = ask(instance, "POST", "/admin/reload")
    assert done.json() == {"message": "a unchanged, b unchanged, c added with 1 replica"}
    instance.until_settled()
    body = {**PLAIN, "model": "c"}

    def answers() -> bool:
        answer = httpx.post(f"{instance.url}/v1/completions", json=body, headers=bearer(USER))
        return answer.status_code == 200

    poll("the new model answers", answers, 30)
    assert instance.replica("a/0").pid == pid


def a_bad_file_changes_nothing(folder: Path, instance: Instance) -> None:
    names = [model["name"] for model in ask(instance, "GET", "/admin/status").json()["models"]]
    wrong = [{**echo("a"), f"nonsense{i}": i} for i in range(20)]
    fewer = [echo("a")], {"gateways": 1}  # which needs a restart
    for (models, server), long in (((wrong, {"gateways": 2}), True), (fewer, False)):
        write_config(folder, models, server, {"keys": KEYS})
        refused = ask(instance, "POST", "/admin/reload")
        assert refusal(refused) == (400, "config_error", "invalid_request_error")
        message = refused.json()["error"]["message"]
        assert message == said(instance, "reload")
        assert (len(message) > LONGEST_MESSAGE) == long  # all of it is told, or it helps nobody
    status = ask(instance, "GET", "/admin/status").json()
    assert [model["name"] for model in status["models"]] == names


@pytest.mark.lane("long")
@pytest.mark.parametrize("server", [{}, {"cors": ["*"]}], ids=["plain", "cors"])
def test_without_keys_nobody_may(tmp_path: Path, server: dict[str, Any]) -> None:
    with Instance.up(tmp_path, [echo("a")], server=server) as instance:
        instance.until_settled()
        for method, path in ENDPOINTS:
            for key in ("", ROOT):
                refused = ask(instance, method, path, key)
                assert refusal(refused) == FORBIDDEN
                message = refused.json()["error"]["message"]
                assert "`admin: true`; on this machine use" in message
        log = (instance.run_dir / "logs" / "gateway-0.log").read_text()
        events = {json.loads(line)["event"] for line in log.splitlines()}
        assert events and not any("reload" in event for event in events)


def test_an_admin_can_be_taken_that_right(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")], sections={"keys": KEYS}) as instance:
        instance.until_settled()
        assert ask(instance, "GET", "/admin/status").status_code == 200
        mere = [{**KEYS[0], "admin": False}, KEYS[1]]
        write_config(tmp_path, [echo("a")], sections={"keys": mere})
        done = ask(instance, "POST", "/admin/reload")
        assert done.json() == {"message": "access changed, a unchanged"}

        def refused() -> bool:
            return ask(instance, "GET", "/admin/status").status_code == 403

        poll("it may not any more", refused, 10)
