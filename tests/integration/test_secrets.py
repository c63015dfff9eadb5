"""No key is in anything that an instance writes or shows: it is given one of every kind there is,
is used and misused, and then all that it has written or shows is searched for them.

The remote endpoint says the key that it was sent in every error, as some do.
"""

from __future__ import annotations

import base64
import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api_keys import new_key
from tests.integration.instance import PROGRAM, Instance, echo

HASHED, HASH = new_key("hashed")
#: Each is searched for as it stands, and in base64, which is how browsers send it.
SECRETS = {
    "hashed": HASHED,
    "environment": "env-Ezu7oTaiR4oosh",
    "file": "file-Ohw2ieR6phahyo",
    "admin": "admin-ooM6aiBohsh8ie",
    "endpoint": "endpoint-Aex8faeG5Equ",
    "hub": "hf_Bai7Ni2aeyahquoo4thooWu",
    "wrong": "wrong-ahs2uChi9shaePh",
}
ADMIN = {"authorization": f"Bearer {SECRETS['admin']}"}


class Babbler(http.server.BaseHTTPRequestHandler):
    """An endpoint that answers once, and then refuses in words that hold the key."""

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "Say hello" in json.dumps(asked):
            choice = {"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}
            piece = {"id": "1", "object": "chat.completion.chunk", "choices": [choice]}
            self._send(
                200, f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n".encode(), "event-stream"
            )
            return
        told = self.headers["authorization"]
        self._say(401, {"error": {"message": f"Incorrect API key provided: {told}"}})

    def _say(self, status: int, body: object) -> None:
        self._send(status, json.dumps(body).encode(), "json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header(
            "content-type", f"text/{kind}" if "stream" in kind else f"application/{kind}"
        )
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Babbler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def instance(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder, outside = tmp_path_factory.mktemp("secrets"), tmp_path_factory.mktemp("outside")
    (outside / "key").write_text(SECRETS["file"] + "\n")
    options = {"url": endpoint, "key_environment": "ENDPOINT_KEY"}
    models = [
        echo("a", crash_on="DIE"),
        {"name": "far", "engine": "openai", "path": "m", "options": options},
    ]
    listed = [
        {"name": "hashed", "hash": HASH},
        {"name": "environment", "environment": "CLIENT_KEY"},
        {"name": "file", "file": str(outside / "key")},
        {"name": "admin", "environment": "ADMIN_KEY", "admin": True},
    ]
    env = {
        "CLIENT_KEY": SECRETS["environment"],
        "ADMIN_KEY": SECRETS["admin"],
        "ENDPOINT_KEY": SECRETS["endpoint"],
        "HF_TOKEN": SECRETS["hub"],
    }
    server = {"ui": True, "gateways": 2}
    with Instance.up(folder, models, server=server, sections={"keys": listed}, env=env) as instance:
        instance.until_settled()
        yield instance


def command(instance: Instance, *args: str) -> str:
    run = [*PROGRAM, *args, "--run-dir", str(instance.run_dir)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def use(http: httpx.Client) -> list[str]:
    """What clients are told, of all kinds of errors among it."""
    said = []
    for name, key in SECRETS.items():
        for model in ("a", "far", "none"):
            body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                answer = http.post("/v1/chat/completions", json=body, headers=headers)
                expected = {"wrong": 401, "endpoint": 401, "hub": 401}.get(name)
                assert expected is None or answer.status_code == expected
                said.append(f"{answer.headers}{answer.text}")
    said.append(http.post("/v1/completions", content=b"{", headers=ADMIN).text)
    dying = {"model": "a", "prompt": "DIE", "max_tokens": 2}
    said.append(http.post("/v1/completions", json=dying, headers=ADMIN).text)
    return said


def shown(http: httpx.Client) -> list[str]:
    """All that is to be read over HTTP, as the one who may read most."""
    paths = ["/readyz", "/openapi.json", "/metrics", "/v1/models", "/docs", "/admin/status"]
    paths += ["/admin/why/a", "/admin/why/far", "/nothing", "/api/tags", "/api/ps"]
    texts = [http.get(path, headers=ADMIN).text for path in paths]
    password = {"authorization": f"Basic {base64.b64encode(b':' + ADMIN_KEY).decode()}"}
    for path in ("/ui/", "/ui/config"):
        answer = http.get(path, headers=password, follow_redirects=True)
        texts.append(f"{answer.headers}{answer.text}")
    assert "servekit_" in texts[2] and '"far"' in texts[5]
    return texts


ADMIN_KEY = SECRETS["admin"].encode()


def seen_by_others(instance: Instance) -> list[str]:
    """What any user of the machine may read of its processes."""
    pids = [instance.pid, *(process.pid for process in instance.survivors())]
    assert len(pids) >= 6
    files = [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "comm", "status")]
    return [path.read_bytes().decode(errors="replace") for path in files if path.exists()]


def test_no_secret_is_written_or_shown(instance: Instance) -> None:
    with httpx.Client(base_url=instance.url, timeout=60) as http:
        told = use(http)
        assert any("Incorrect API key provided" in one for one in told)
        gone = lambda: "SIGKILL" in command(instance, "why", "a")  # noqa: E731
        instance.until("the death is told of", gone, within_s=60)
        told += shown(http)
    told += seen_by_others(instance)
    for args in (["ps"], ["ps", "--json"], ["why", "far"], ["events"], ["logs"], ["reload"]):
        told.append(command(instance, *args))
    files = [path for path in instance.run_dir.parent.rglob("*") if path.is_file()]
    assert {"events.db", "up.log", "gateway-0.log"} <= {path.name for path in files}
    told += [path.read_bytes().decode(errors="replace") for path in files]
    everything = "\n".join(told)
    for name, secret in SECRETS.items():
        assert secret not in everything, f"{name}: {context(everything, secret)}"
        encoded = base64.b64encode(f":{secret}".encode()).decode().rstrip("=")
        assert encoded not in everything, f"{name}, in base64"


def context(text: str, secret: str) -> str:
    at = text.index(secret)
    return text[max(0, at - 200) : at + len(secret) + 50]


def test_a_child_has_no_secret_that_is_not_its_own(instance: Instance) -> None:
    """The gateways know digests; the endpoint's key is its own model's workers' alone."""
    for process in instance.survivors():
        environ = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace")
        theirs = {"endpoint"} if "far/" in line else set()
        for name in {"hashed", "environment", "file", "admin", "endpoint"} - theirs:
            assert SECRETS[name] not in environ, (name, line)


@pytest.mark.lane("long")
def test_what_it_writes_is_its_users_alone(instance: Instance) -> None:
    """The folder is 0700; what is in it would be private without that, too, but for the logs."""
    assert instance.run_dir.stat().st_mode & 0o077 == 0
    for path in instance.run_dir.rglob("*"):
        assert path.lstat().st_uid == os.getuid()
        if path.suffix == ".sock":
            assert path.stat().st_mode & 0o077 == 0, path
