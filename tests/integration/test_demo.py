"""configs/demo.yaml serves as it stands, but for its port."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import yaml

from tests.integration.instance import Instance

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.mark.lane("models")
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_demo_chats(tmp_path: Path) -> None:
    demo = yaml.safe_load(DEMO.read_text())
    server = demo.pop("server") | {"port": 0, "ui": True}
    with Instance.up(tmp_path, demo.pop("models"), server=server, sections=demo) as instance:
        url = instance.until_settled(300).url
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": "smollm2", "messages": [question], "temperature": 0, "max_tokens": 16}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        assert httpx.get(f"{url}/ui", follow_redirects=True).status_code == 200
