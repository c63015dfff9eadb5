"""Files of other programs, brought by `servekit init --from` and served."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.instance import Instance, run
from tests.polling import poll
from tests.unit.cli.init.test_ollama import Store
from tests.unit.engines.origins import write_tiny_gguf

TESTS = Path(__file__).parents[1]
LLAMA_SWAP = """
healthCheckTimeout: 60
macros:
  weights: nowhere.gguf
  python: {python}
  llama: "${{python}} {tests}/llama_server.py ${{weights}}"
models:
  tiny:
    macros: {{weights: {weights}}}
    cmd: |
      # llama.cpp's own server
      ${{llama}} \\
      ${{PORT}}
    aliases: [gpt-4o-mini]
    env: ["CUDA_VISIBLE_DEVICES=", "MARK=1"]
    ttl: 300
  counter:
    proxy: http://127.0.0.1:18999
    cmd: ${{python}} {tests}/odd_server.py --port 18999
    ttl: 1
    concurrencyLimit: 2
"""


@contextlib.contextmanager
def serve(folder: Path, config: Path) -> Iterator[Instance]:
    instance = Instance(folder, config, "--port", "0")
    try:
        instance.until("it answers on its control socket", instance.running)
        yield instance
    finally:
        instance.end()


def init(folder: Path, *args: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    output = folder / "servekit.yaml"
    done = run("init", *args, "-o", str(output))
    assert done.returncode == 0, done.stderr
    checked = run("check", str(output))
    assert checked.returncode == 0, checked.stderr
    return output, done


def complete(instance: Instance, model: str) -> str:
    asked = {"model": model, "prompt": "count", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{instance.url}/v1/completions", json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.lane("long")
@pytest.mark.timeout(240)
def test_llama_swaps_models_are_started_by_requests(tmp_path: Path) -> None:
    theirs = tmp_path / "config.yaml"
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    python = shlex.quote(sys.executable)
    theirs.write_text(LLAMA_SWAP.format(python=python, tests=TESTS, weights=weights))
    config, done = init(tmp_path, "--from", "llama-swap", str(theirs))
    assert "not carried over: --listen: " in done.stderr
    with serve(tmp_path, config) as instance:
        assert complete(instance, "counter") == " 0; 1; 2;"
        assert complete(instance, "gpt-4o-mini")
        poll("its ttl ends it", lambda: not instance.model("counter").replicas, 60)
        assert instance.model("tiny").replicas  # whose ttl is longer
        assert complete(instance, "counter") == " 0; 1; 2;"


@pytest.mark.lane("long")
@pytest.mark.timeout(240)
def test_ollamas_models_are_served_from_its_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "ollama/models")
    weights = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    store.add("registry.ollama.ai/library/tiny/latest", model=weights, params=b'{"num_ctx": 64}')
    config, _ = init(tmp_path, "--from", "ollama", str(tmp_path / "ollama"))
    with serve(tmp_path, config) as instance:
        assert complete(instance, "tiny") == complete(instance, "tiny:latest")
        asked = {"model": "tiny:latest", "prompt": "x", "stream": False}
        answer = httpx.post(f"{instance.url}/api/generate", json=asked, timeout=60).json()
        assert answer["done"], answer


@pytest.mark.lane("long")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x"], "say what 'x' is: --from llama-swap, ollama, vllm or huixiangdou"),
        (["--from", "x"], "--from knows llama-swap, ollama, vllm or huixiangdou, not 'x'"),
        (["--from", "vllm"], "what is to be converted is missing: --from vllm 'vllm serve ORG"),
        (["--from", "llama-swap", "nowhere.yaml"], "nowhere.yaml: there is no such file."),
    ],
)
def test_what_cannot_be_brought_is_said(tmp_path: Path, args: list[str], said: str) -> None:
    done = run("init", *args, "-o", str(tmp_path / "x.yaml"))
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "x.yaml").exists()


def test_a_program_that_is_not_here_is_said(tmp_path: Path) -> None:
    theirs = tmp_path / "config.yaml"
    theirs.write_text("models: {a: {cmd: 'no-such-server --port ${PORT}'}}")
    done = run("init", "--from", "llama-swap", str(theirs), "-o", str(tmp_path / "x.yaml"))
    assert done.returncode == 2
    assert "x.yaml, but it cannot be served so: " in done.stderr
    assert "there is no program no-such-server in PATH" in done.stderr
