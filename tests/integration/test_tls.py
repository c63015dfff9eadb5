"""HTTPS on a real instance, with the clients people have and a certificate made on the spot."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from servekit.cli.chat.stream import list_models
from servekit.errors import StartError
from tests.integration.certificates import make
from tests.integration.instance import PROGRAM, Instance, echo, write_config
from tests.polling import poll

pytestmark = pytest.mark.timeout(120)

TLS = {"certificate": "server.pem", "key": "server.key"}
BODY = {"model": "a", "prompt": "hello", "max_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def instance(folder: Path) -> Iterator[Instance]:
    with Instance.up(folder, [echo("a")], server={"tls": TLS}) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture
def trust(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "server.pem"))


def address(instance: Instance) -> tuple[str, int]:
    url = httpx.URL(instance.url)
    assert url.scheme == "https" and url.port is not None
    return url.host, url.port


def test_the_openai_client(instance: Instance, trust: ssl.SSLContext) -> None:
    http = openai.DefaultHttpxClient(verify=trust)
    with openai.OpenAI(base_url=f"{instance.url}/v1", api_key="x", http_client=http) as client:
        for _ in range(3):  # on one connection
            answer = client.completions.create(model="a", prompt="hello", max_tokens=5)
            assert answer.choices[0].text == "hello"
        long = client.completions.create(model="a", prompt="abc", max_tokens=8000, stream=True)
        assert len("".join(chunk.choices[0].text for chunk in long)) == 8000
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nope", prompt="x")


def test_the_chat_says_whose_certificate_it_wants(
    instance: Instance, trust: ssl.SSLContext
) -> None:
    url, said = f"{instance.url}/v1", r"its certificate is not trusted \(self-signed.*--ca"
    with (
        httpx.Client(base_url=url, trust_env=False) as stranger,
        pytest.raises(StartError, match=said),
    ):
        list_models(stranger)
    with httpx.Client(base_url=url, verify=trust) as client:
        assert list_models(client) == ["a"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl(instance: Instance, folder: Path) -> None:
    command = ["curl", "-sS", "--cacert", str(folder / "server.pem"), f"{instance.url}/readyz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, '"status":"ready"' in done.stdout) == (0, True), done.stderr


def test_no_stranger_is_trusted_and_nothing_is_said_in_the_clear(instance: Instance) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{instance.url}/livez", trust_env=False)
    with socket.create_connection(address(instance), timeout=10) as plain:
        plain.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" not in plain.recv(1000)


def test_a_refusal_reaches_its_client_and_the_connection_ends(
    instance: Instance, trust: ssl.SSLContext
) -> None:
    with (
        socket.create_connection(address(instance), timeout=20) as plain,
        trust.wrap_socket(plain, server_hostname="127.0.0.1") as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000)
        answer = b""
        while piece := client.recv(4096):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 431")
        assert b"header_too_large" in answer


def test_silence_and_half_a_handshake_hurt_nobody(
    instance: Instance, trust: ssl.SSLContext
) -> None:
    idle = [socket.create_connection(address(instance), timeout=10) for _ in range(50)]
    idle[0].sendall(b"\x16\x03\x01")
    assert httpx.get(f"{instance.url}/livez", verify=trust).status_code == 200
    for connection in idle:
        connection.close()


def test_a_renewed_certificate_needs_a_reload_only(tmp_path: Path) -> None:
    make(tmp_path)
    models: list[dict[str, Any]] = [echo("a")]
    with Instance.up(tmp_path, models, server={"tls": TLS}) as instance:
        pids = {gateway.pid for gateway in instance.until_settled().gateways}
        old = ssl.get_server_certificate(address(instance))
        trust = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
        kept = httpx.Limits(keepalive_expiry=None)  # however long a reload takes
        with httpx.Client(base_url=instance.url, verify=trust, limits=kept) as http:
            assert http.get("/livez").status_code == 200
            make(tmp_path)
            command = [*PROGRAM, "reload", "--run-dir", str(instance.run_dir)]
            subprocess.run(command, check=True, timeout=60, capture_output=True)
            new = (tmp_path / "server.pem").read_text()
            assert new != old
            poll(
                "new connections get it",
                lambda: ssl.get_server_certificate(address(instance)).strip() == new.strip(),
                10,
            )
            assert http.get("/livez").status_code == 200  # the old connection goes on
        assert {gateway.pid for gateway in instance.status().gateways} == pids
        make(tmp_path, days=(-9, -1))
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (refused.returncode, "has expired" in refused.stderr) == (2, True)


@pytest.mark.lane("long")
def test_check_says_what_is_wrong(tmp_path: Path) -> None:
    make(tmp_path, days=(-9, -1))
    config = write_config(tmp_path, [echo("a")], {"tls": TLS})
    command = [*PROGRAM, "check", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "the certificate has expired" in done.stderr) == (2, True)
