"""The request as code does what the page does, and tells no key."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

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
