"""Real proxies in front: nginx and HAProxy, with the settings that the pages show and no others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from servekit.docs.pages import find_page
from tests.integration.chromium import start_chromium
from tests.integration.instance import Instance, bearer, echo
from tests.integration.test_access import ALICE, ALICE_HASH
from tests.integration.test_ui import Tab
from tests.polling import poll

pytestmark = [pytest.mark.lane("surroundings"), pytest.mark.slow]

NAMES = ("nginx", "haproxy")
PATHS = {name: shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") for name in NAMES}
#: A stream that would last for minutes.
LONG = {"model": "slow", "prompt": "x" * 4000, "max_tokens": 4000, "stream": True}
SHORT = {"model": "fast", "prompt": "hello", "max_tokens": 5}

#: What surrounds the section on a user's machine.
NGINX = """
{user} daemon off; error_log stderr; pid {folder}/nginx.pid; events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port};
{section}
  }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 1m
frontend public
  bind 127.0.0.1:{port}
  default_backend servekit
{section}
"""


def section_of(name: str, backend: str) -> str:
    """The page's block for this proxy, with the instance's address."""
    text = find_page("access").path.read_text()
    found = re.search(rf"^```{name}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].replace("127.0.0.1:8000", backend)


@contextlib.contextmanager
def proxy(name: str, folder: Path, backend: str) -> Iterator[str]:
    """Run a proxy in front of `backend`; the URL by which it answers."""
    program = PATHS[name]
    if program is None:
        pytest.skip(f"no {name}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = folder / f"{name}.conf"
    form = NGINX if name == "nginx" else HAPROXY
    user = "" if os.geteuid() else "user root;"  # else it may not write to our folder
    section = section_of(name, backend)
    config.write_text(form.format(folder=folder, port=port, section=section, user=user))
    words = (
        ["-p", str(folder), "-c", str(config)] if name == "nginx" else ["-db", "-f", str(config)]
    )
    process = subprocess.Popen([program, *words])
    try:
        url = f"http://127.0.0.1:{port}"
        poll("it answers", lambda: answers(url))
        yield url
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/livez").status_code == 200
    return False


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    models = [echo("slow", step_s=0.05), echo("fast", step_s=0.02)]
    server: dict[str, Any] = {"ui": True, "trusted_proxies": ["127.0.0.1"], "gateways": 2}
    sections = {"keys": [{"name": "alice", "hash": ALICE_HASH}]}
    folder = tmp_path_factory.mktemp("proxies")
    with Instance.up(folder, models, server=server, sections=sections) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture(scope="module", params=NAMES)
def front(request: pytest.FixtureRequest, instance: Instance) -> Iterator[str]:
    folder = instance.run_dir.parent / request.param
    folder.mkdir()
    with proxy(request.param, folder, instance.url.removeprefix("http://")) as url:
        yield url


def in_flight(instance: Instance) -> int:
    return sum(gateway.in_flight for gateway in instance.status().gateways)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/messages", {**LONG, "messages": [{"role": "user", "content": "x" * 4000}]}),
        ("/api/generate", LONG),
    ],
)
def test_a_stream_arrives_as_it_is_made_and_ends_with_its_client(
    instance: Instance, front: str, path: str, body: dict[str, Any]
) -> None:
    with httpx.stream("POST", front + path, json=body, headers=bearer(ALICE), timeout=60) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_text()
        assert next(pieces) and next(pieces)
        poll("it is under way", lambda: in_flight(instance) == 1)
    poll("the gateway knows that the client has gone", lambda: in_flight(instance) == 0)


def test_a_proxy_is_believed_as_to_the_client(instance: Instance, front: str) -> None:
    port = int(front.rpartition(":")[2])
    elsewhere = f"127.0.1.{1 + port % 250}"  # another for each proxy
    with httpx.Client(transport=httpx.HTTPTransport(local_address=elsewhere)) as http:
        wrong = http.post(f"{front}/ui/login", data={"key": "sk-wrong"}, headers={"origin": front})
        assert wrong.status_code == 401, wrong.text
    instance.until("it is logged", lambda: f"address={elsewhere}" in instance.log)


def test_a_large_body_and_many_requests_pass(front: str) -> None:
    with httpx.Client(base_url=front, headers=bearer(ALICE), timeout=60) as http:
        for _ in range(20):
            assert http.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == "hello"
        large = http.post("/v1/completions", content=json.dumps(SHORT) + " " * 4_000_000)
        assert large.status_code == 200, large.text


@pytest.mark.browser
def test_the_chat_streams_through_a_proxy(instance: Instance, front: str) -> None:
    instance.until("the UI is up", lambda: httpx.get(f"{front}/ui/login").status_code == 200)
    with start_chromium() as browser, contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(f"{front}/ui/login")
        page.locator("input[name=key]").fill(ALICE)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{front}/ui/")
        tab = Tab(context, front)
        tab.choose("slow")
        tab.ask("All work and no play makes this a long answer. " * 20)
        expect(tab.answers.last).to_contain_text("All work")
        tab.stop_button.click()
        tab.until_done()
    poll("nothing runs", lambda: in_flight(instance) == 0)
