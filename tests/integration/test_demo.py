"""Files of configs/ serve as they stand, but for their port."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.integration.instance import Instance
from tests.integration.made_up_gpus import MadeUpGpus

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


def echo_of(folder: Path, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a file's models, by the echo engine instead of their own, and its other sections.

    Echo cannot be spread over GPUs, as configs/vllm-two-gpus.yaml is.
    """
    file = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    models = [one | {"engine": "echo", "device": "cuda", "options": {}} for one in file["models"]]
    for one in models:
        for adapter in one.get("adapters", ()):
            (folder / adapter["path"]).mkdir(parents=True)
            (folder / adapter["path"] / "adapter_config.json").write_text('{"transform": "upper"}')
    return models, {key: file[key] for key in file.keys() - {"models", "server"}}


@pytest.mark.parametrize(
    ("name", "args", "served"),
    [
        ("lora", (), ["qwen3-0.6b", "sql", "support"]),
        pytest.param(
            *("workstation-48gb", ("--profile", "coding"), ["coder", "embed"]),
            marks=pytest.mark.lane("long"),
        ),
        pytest.param(
            *("workstation-24gb", (), ["chat", "coder", "embed"]), marks=pytest.mark.lane("long")
        ),
        pytest.param(
            *("one-gpu", (), ["chat", "embed", "coder", "thinker"]), marks=pytest.mark.lane("long")
        ),
        pytest.param("vllm", (), ["qwen3-8b"], marks=pytest.mark.lane("long")),
        pytest.param("two-gpus", (), ["qwen3-0.6b"], marks=pytest.mark.lane("long")),
    ],
)
def test_a_file_serves_each_model_on_made_up_gpus(
    tmp_path: Path, name: str, args: tuple[str, ...], served: list[str]
) -> None:
    models, sections = echo_of(tmp_path, name)
    gpus = MadeUpGpus(tmp_path, 2 if name == "two-gpus" else 1)
    with Instance.up(tmp_path, models, *args, sections=sections, env=gpus.env) as instance:
        url = instance.until_settled().url
        for model in served:
            body = {"model": model, "prompt": "word ", "max_tokens": 3}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text


def test_open_webui_finds_what_its_settings_say(tmp_path: Path) -> None:
    """Ask as Open WebUI does, by the addresses, models and keys of its compose file."""
    compose = CONFIGS.parent / "deploy" / "compose" / "open-webui.yaml"
    settings = yaml.safe_load(compose.read_text())["services"]["open-webui"]["environment"]
    models, sections = echo_of(tmp_path, "rag")
    gpus = MadeUpGpus(tmp_path)
    with Instance.up(tmp_path, models, sections=sections, env=gpus.env) as instance:
        url = instance.until_settled().url
        client = httpx.Client(base_url=url, headers={"authorization": "Bearer none"})
        base = urlsplit(settings["OPENAI_API_BASE_URL"]).path
        listed = [one["id"] for one in client.get(f"{base}/models").json()["data"]]
        assert listed == ["chat", "embed", "rerank"]
        hello = [{"role": "user", "content": "hello"}]
        asked = {"model": "chat", "messages": hello, "stream": True}
        assert "hello" in client.post(f"{base}/chat/completions", json=asked).text
        texts = {"input": ["a", "b"], "model": settings["RAG_EMBEDDING_MODEL"]}
        address = urlsplit(settings["RAG_OPENAI_API_BASE_URL"]).path
        assert len(client.post(f"{address}/embeddings", json=texts).json()["data"]) == 2
        query = {
            "model": settings["RAG_RERANKING_MODEL"],
            "query": "a", "documents": ["a", "b"], "top_n": 2,
        }  # fmt: skip
        found = client.post(urlsplit(settings["RAG_EXTERNAL_RERANKER_URL"]).path, json=query)
        ranked = found.json()["results"]
        assert {one["index"] for one in ranked} == {0, 1}
        assert all("relevance_score" in one for one in ranked)
