"""HuixiangDou's client against a real instance, on the port where its own server listened."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.integration.instance import Instance, echo, write_config
from tests.integration.old_client import chat_stream, generate_response


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


def model(tokens: int, **options: Any) -> dict[str, Any]:
    return echo("a", **options) | {"sampling": {"max_tokens": tokens}}


async def printed(url: str, prompt: str) -> list[str]:
    return [text async for text in chat_stream(url, prompt)]


def test_its_client_finds_it_on_a_port_of_its_own(tmp_path: Path) -> None:
    port = free_port()
    server = {"legacy": "huixiangdou", "legacy_port": port, "gateways": 2}
    with Instance.up(tmp_path, [model(4, step_s=0.01)], server=server) as instance:
        instance.until_settled()
        old = f"http://127.0.0.1:{port}"
        for url in (old, instance.url):
            assert generate_response(f"{url}/inference", "你好, you", [("q", "a")]) == (
                "你好, ",
                "",
            )
            assert asyncio.run(printed(f"{url}/stream", "a  b")) == ["a", "  b"]
        ids = [one["id"] for one in httpx.get(f"{old}/v1/models").json()["data"]]
        assert ids == ["a"]  # the whole API is there
        assert httpx.get(f"{old}/readyz").status_code == 200
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_its_port_is_named_where_it_is_busy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = {"legacy": "huixiangdou", "legacy_port": port}
        config = write_config(tmp_path, [model(4)], server)
        up = ("up", "--config", str(config), "--run-dir", str(tmp_path / "run"))
        done = subprocess.run(
            [sys.executable, "-m", "servekit", *up], capture_output=True, text=True, timeout=30
        )
    assert done.returncode == 1
    assert f"127.0.0.1:{port} is already in use by pid" in done.stderr
    assert "server.legacy_port" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_restart_is_waited_for(tmp_path: Path) -> None:
    """Its worker dies of the first request, comes back, and answers the second meanwhile asked."""
    models = [model(3, crash_on="boom", load_s=1.0)]
    with Instance.up(tmp_path, models, server={"legacy": "huixiangdou"}) as instance:
        url = f"{instance.url}/inference"
        assert generate_response(url, "abc") == ("abc", "")  # while it loads for the first time
        before = instance.replica("a/0").pid
        with httpx.Client() as http, pytest.raises(httpx.ReadTimeout):
            http.post(url, json={"prompt": "boom"}, timeout=0.5)
        instance.until("it is gone", lambda: instance.replica("a/0").pid != before)
        assert generate_response(url, "def") == ("def", "")


def test_a_failure_after_the_first_text_is_a_connection_cut(tmp_path: Path) -> None:
    """What has come is text, and then the client hears of it as an error of the transport."""
    port = free_port()
    server = {"legacy": "huixiangdou", "legacy_port": port, "drain_timeout_s": 0.2}
    with Instance.up(tmp_path, [model(4000, step_s=0.01)], server=server) as instance:
        instance.until_settled()
        seen = ""

        async def read() -> None:
            nonlocal seen
            async for text in chat_stream(f"http://127.0.0.1:{port}/stream", "ab"):
                if not seen:
                    instance.process.terminate()
                seen += text

        with pytest.raises(aiohttp.ClientError):
            asyncio.run(read())
        assert set(seen) == {"a", "b"}
        assert instance.wait() == 0
