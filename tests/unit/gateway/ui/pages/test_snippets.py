"""The request as code does what the page does, and tells no key."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from servekit.gateway.api.audio.endpoints import TRANSCRIPTIONS, TRANSLATIONS
from servekit.gateway.api.audio.form import read_form
from servekit.gateway.http.asgi import read_body, send_json
from servekit.gateway.server import serving
from servekit.gateway.ui.pages.language import SAY_ENGLISH
from servekit.gateway.ui.pages.snippets import render_snippets, write_curl, write_python
from servekit.gateway.ui.widgets.request_runner import CHAT, COMPLETIONS, RequestOptions

HOSTILE = 'it\'s "quoted" $(touch /tmp/x) `id` \\ \n</pre><script>alert(1)</script> ${HOME}'
WISHES = [
    RequestOptions(
        CHAT, {"model": "m", "messages": [{"role": "user", "content": HOSTILE}], "top_k": 5}
    ),
    RequestOptions(COMPLETIONS, {"model": "m", "prompt": HOSTILE, "logprobs": 5}),
    RequestOptions("/v1/embeddings", {"model": "m", "input": [HOSTILE]}),
]
#: A form: its file, and fields that look like files.
HEARD = [
    RequestOptions(path, {"file": "speech.wav", "model": "m", "prompt": f"@{HOSTILE}"} | more)
    for path, more in (
        (TRANSCRIPTIONS, {"language": "de", "response_format": "verbose_json"}),
        (TRANSLATIONS, {"language": "<de"}),
    )
]


@pytest.mark.parametrize("options", WISHES, ids=lambda options: str(options.path))
def test_a_shell_hands_curl_the_very_body(options: RequestOptions) -> None:
    line = write_curl("http://127.0.0.1:1", options, closed=True)
    show = 'curl() { printf "%s\\0" "$@"; }\n' + line
    env = {**os.environ, "SERVEKIT_API_KEY": "sk-test"}
    run = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True, env=env)
    arguments = run.stdout.split("\0")
    assert arguments[0] == "http://127.0.0.1:1" + options.path
    assert "Authorization: Bearer sk-test" in arguments
    assert json.loads(arguments[arguments.index("-d") + 1]) == options.body


@pytest.mark.parametrize("options", HEARD, ids=lambda options: str(options.path))
async def test_curl_sends_the_form(options: RequestOptions, tmp_path: Path) -> None:
    forms: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(scope, receive, 2**20)
        kind = dict(scope["headers"])[b"content-type"]
        forms.append((scope["path"], dict(scope["headers"]), read_form(kind, body)))
        await send_json(send, b"{}")

    (tmp_path / "speech.wav").write_bytes(b"RIFF")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving(app, listener):
            origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
            env = {**os.environ, "SERVEKIT_API_KEY": "sk-test"}
            line = write_curl(origin, options, closed=True)
            process = await asyncio.create_subprocess_exec(
                "bash", "-c", line, cwd=tmp_path, env=env
            )
            assert await process.wait() == 0
    [(path, headers, form)] = forms
    assert (path, headers[b"authorization"]) == (options.path, b"Bearer sk-test")
    assert form.file == b"RIFF"
    assert json.loads(form.fields) == {**options.body, "file": ""}


@pytest.mark.filterwarnings("ignore:deprecated")
@pytest.mark.parametrize("options", HEARD, ids=lambda options: str(options.path))
def test_python_sends_the_form(
    options: RequestOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"text": "heard"})

    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(openai, "OpenAI", partial(openai.OpenAI, http_client=client))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speech.wav").write_bytes(b"RIFF")
    exec(write_python("http://h", options, closed=False), {})
    form = read_form(asked[0].headers["content-type"].encode(), asked[0].read())
    assert (asked[0].url.path, form.file) == (options.path, b"RIFF")
    assert json.loads(form.fields) == {**options.body, "file": ""}


@pytest.mark.parametrize("options", WISHES, ids=lambda options: str(options.path))
def test_python_asks_for_the_same(options: RequestOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Client:
        def __init__(self, **settings: Any) -> None:
            assert settings == {"base_url": "http://h/v1", "api_key": "sk-test"}

        def __getattr__(self, name: str) -> Any:
            return self

        def create(self, **body: Any) -> Any:
            asked.append({**body, **body.pop("extra_body", {})})
            raise StopIteration

    monkeypatch.setenv("SERVEKIT_API_KEY", "sk-test")
    monkeypatch.setattr("openai.OpenAI", Client)
    with pytest.raises(StopIteration):
        exec(write_python("http://h", options, closed=True), {})
    asked[0].pop("extra_body", None)
    assert asked[0] == options.body


def test_without_keys_none_is_asked_for_and_html_is_escaped() -> None:
    assert "SERVEKIT_API_KEY" not in write_curl("http://h", WISHES[0], closed=False)
    assert 'api_key="none"' in write_python("http://h", WISHES[0], closed=False)
    made = render_snippets("http://h", WISHES[0], SAY_ENGLISH, closed=True)
    assert "<script" not in made
    assert made.count("<pre") == made.count("</pre>") == 2
