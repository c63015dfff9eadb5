"""How HuixiangDou's own client asks its LLM server, and how it reads the answers.

Written after `huixiangdou/service/llm_client.py` of InternLM/HuixiangDou: the same libraries, the
same calls of them, the same way of taking streams apart. What it prints is what it yields here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import requests

TIMEOUT_S = 300


def _body(prompt: str, history: Sequence[Sequence[str]], backend: str) -> str:
    pairs = [[item[0], item[1]] for item in history]
    return json.dumps({"prompt": prompt, "history": pairs, "backend": backend})


def generate_response(
    url: str, prompt: str, history: Sequence[Sequence[str]] = (), backend: str = "local"
) -> tuple[str, str]:
    """Its `generate_response`: the text it returns, and the error it logs; "" for none."""
    headers = {"Content-Type": "application/json"}
    try:
        data = _body(prompt, history, backend)
        resp = requests.post(url, headers=headers, data=data, timeout=TIMEOUT_S)
        if resp.status_code != 200:
            raise OSError(str((resp.status_code, resp.reason)))
        answer: dict[str, Any] = resp.json()
        text: str = answer["text"]
        error = answer.get("error", "")
        return text, error if len(error) > 0 else ""
    except Exception as error:
        return "", f"the client gave up: {error}"


async def chat_stream(
    url: str, prompt: str, history: Sequence[Sequence[str]] = (), backend: str = "local"
) -> AsyncIterator[str]:
    """Its `chat_stream`: what it yields to be printed. Raises what it logs."""
    headers = {"Content-Type": "application/json"}
    data = _body(prompt, history, backend)
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, headers=headers, data=data) as response,
    ):
        if response.status != 200:
            raise OSError(response.status)
        async for chunk in response.content.iter_any():
            for mime in chunk.decode().strip().split("\r\n\r\n"):
                at = mime.find("data: ") + len("data: ")
                yield mime[at:]
