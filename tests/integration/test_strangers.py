"""A web page of somebody else's, and an instance on loopback without keys."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.instance import Instance, echo, write_config


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance.up(tmp_path_factory.mktemp("strangers"), [echo("a")]) as instance:
        instance.until_settled()
        yield instance


def status(instance: Instance, path: str, **headers: str) -> int:
    body = (
        b'{"model": "a", "prompt": "hello", "max_tokens": 2}' if path.startswith("/v1/c") else None
    )
    method = "POST" if body else "GET"
    plain = {"content-type": "text/plain", **headers}  # what a page may send without asking
    answer = httpx.request(method, instance.url + path, content=body, headers=plain, timeout=30)
    if answer.status_code == 403:
        assert answer.json()["error"]["code"] == "forbidden"
    return answer.status_code


def test_another_name_for_this_address_is_refused(instance: Instance) -> None:
    for path in ("/v1/completions", "/v1/models", "/metrics"):
        assert status(instance, path) == 200
        assert status(instance, path, host="localhost:1") == 200
        assert status(instance, path, host="evil.example") == 403
    assert status(instance, "/livez", host="evil.example") == 200


def test_a_form_of_another_site_is_refused(instance: Instance) -> None:
    assert status(instance, "/v1/completions", origin="https://evil.example") == 403
    assert status(instance, "/v1/completions", origin="null") == 403
    assert status(instance, "/v1/completions", origin=instance.url) == 200


def test_a_reload_takes_names(instance: Instance) -> None:
    folder = instance.run_dir.parent
    write_config(folder, [echo("a")], {"hosts": ["llm.example.com"]})
    instance.signal(signal.SIGHUP)
    proxied = lambda: status(instance, "/v1/models", host="llm.example.com") == 200  # noqa: E731
    instance.until("the name is taken", proxied, within_s=60)
    assert status(instance, "/v1/models", host="evil.example") == 403
