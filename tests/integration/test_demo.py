"""Files of configs/ serve as they stand, but for their port."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from tests.integration.instance import Instance

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.lane("models")
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["demo", "llamacpp"])
def test_a_file_with_a_real_model_chats(tmp_path: Path, name: str) -> None:
    demo = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    server = demo.pop("server") | {"port": 0, "ui": True}
    with Instance.up(tmp_path, demo.pop("models"), server=server, sections=demo) as instance:
        url = instance.until_settled(300).url
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": "smollm2", "messages": [question], "temperature": 0, "max_tokens": 16}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        # its page is imported meanwhile, and returns 503 until then
        instance.until("the page", lambda: httpx.get(f"{url}/ui/").status_code == 200)


@pytest.mark.lane("long")
def test_the_file_that_scales_adds_a_replica_under_load(tmp_path: Path) -> None:
    file = yaml.safe_load((CONFIGS / "autoscaling.yaml").read_text())
    question = {"role": "user", "content": "a" * 400}
    body = {"model": "echo", "messages": [question], "max_tokens": 400}
    with Instance.up(tmp_path, file["models"]) as instance:
        url = f"{instance.until_settled(60).url}/v1/chat/completions"
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(httpx.post, url, json=body, timeout=120) for _ in range(8)]
            assert all(one.result().status_code == 200 for one in answers)
        assert "scaled up to" in instance.run("events").stdout
