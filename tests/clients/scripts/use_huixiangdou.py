"""HuixiangDou's two ways to ask, with requests as it has them.

`/inference` and `/stream` of its own server, on the legacy port; and `chat_once` of its present
class, which asks any server like OpenAI's, names no model where its file names none, and gives
back one of its slots only after a good answer.
"""

from __future__ import annotations

import json

import requests
from report import KEY, LEGACY_URL, MODEL, QUESTION, URL, check, tell

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


def chat_once(model: str | None) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0.7, "top_p": 0.7}
    if model is not None:
        body["model"] = model
    body["max_tokens"] = 16
    made = requests.post(f"{URL}/v1/chat/completions", json=body, headers=HEADERS, timeout=120)
    assert made.status_code == 200, made.text[:300]
    assert made.json()["choices"][0]["message"]["content"], made.text[:300]


def inference() -> None:
    body = {"prompt": QUESTION, "history": [["Hello", "Hi!"]], "backend": "local"}
    data = json.dumps(body)
    made = requests.post(f"{LEGACY_URL}/inference", data=data, headers=HEADERS, timeout=240)
    told = made.json()
    assert made.status_code == 200 and told["text"] and not told["error"], told


def stream() -> None:
    body = {"prompt": QUESTION, "history": [], "backend": "local"}
    url = f"{LEGACY_URL}/stream"
    with requests.post(url, json=body, headers=HEADERS, stream=True, timeout=240) as made:
        lines = [line.decode() for line in made.iter_lines() if line]
    assert lines and all(line.startswith("data:") for line in lines), lines[:3]


check("chat_once", lambda: chat_once(MODEL))
check("chat_once_empty_model", lambda: chat_once(""))
check("chat_once_no_model", lambda: chat_once(None))
if LEGACY_URL:
    check("inference", inference)
    check("stream", stream)
else:
    tell("inference", "not tried: --legacy-url was not given")
