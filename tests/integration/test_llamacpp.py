"""A GGUF file served by llama.cpp, through the whole of servekit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.instance import Instance
from tests.polling import poll
from tests.unit.engines.origins import SMOLLM2, hub_server, write_tiny_gguf

ASKED = {
    "messages": [{"role": "user", "content": "The quick brown fox"}],
    "temperature": 0.0,
    "max_tokens": 150,
}


def model(path: Path | str, **fields: Any) -> dict[str, Any]:
    options = {"threads": 1, "cache_type": "f32", "flash_attention": "off"}
    known = {"name": "m", "engine": "llamacpp", "path": str(path), "device": "cpu"}
    return {**known, "replicas": 1, "options": options, **fields}


def chat(url: str, **fields: Any) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "m", **ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(url: str, **fields: Any) -> Iterator[str]:
    body = {"model": "m", **ASKED, "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if choices and (piece := choices[0]["delta"].get("content")):
                    yield piece


def environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    return dict(line.split("=", 1) for line in lines)


def is_another(instance: Instance, pids: list[int]) -> bool:
    return instance.replica("m/0").pid not in (0, *pids)


def test_a_stream_goes_on_when_its_worker_is_killed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", float32=True, context=4096)
    with Instance.up(tmp_path, [model(path)]) as instance:
        instance.until_settled()
        url, pid = instance.url, instance.replica("m/0").pid
        # The pin is there before the interpreter's first instruction: no library can be too early.
        # Nor is there one that could be: torch, which is known to ask for CUDA, is not loaded.
        assert environment(pid)["CUDA_VISIBLE_DEVICES"] == ""
        assert environment(pid)["GGML_NO_BACKTRACE"] == "1"
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        pids = [pid]
        # what is there before the next look comes as one piece: of a longer answer not all is
        for tokens in (150, 600, 1800):
            whole = chat(url, max_tokens=tokens)
            pieces = []
            for piece in streamed(url, max_tokens=tokens):
                pieces.append(piece)
                if len(pieces) == 1:
                    os.kill(pids[-1], signal.SIGKILL)
            assert "".join(pieces) == whole
            instance.until("it is replaced", lambda: is_another(instance, pids), 60)
            instance.until_settled()
            pids.append(instance.replica("m/0").pid)
            if len(pieces) > 1:
                break
        assert len(pieces) > 1
        assert chat(url, max_tokens=tokens) == whole


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_a_speculating_worker_that_is_killed_changes_no_text(tmp_path: Path, method: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", float32=True, context=4096)
    entry = model(path)
    asked: dict[str, Any] = {"method": method, "tokens": 3}
    asked |= {"ngram_min": 1} if method == "ngram" else {"model": str(path)}
    own = {**entry, "options": {**entry["options"], "speculative": asked}}
    with Instance.up(tmp_path, [own, {**entry, "name": "p"}]) as instance:
        instance.until_settled()
        info = instance.model("m").info
        assert info is not None and f"3 proposed tokens ({method}): 4 take" in info.detail
        whole, pid = chat(instance.url, model="p", max_tokens=1200), instance.replica("m/0").pid
        pieces = []
        for piece in streamed(instance.url, max_tokens=1200):
            pieces.append(piece)
            if len(pieces) == 1:
                os.kill(pid, signal.SIGKILL)
        assert "".join(pieces) == whole
        instance.until("it is replaced", lambda: is_another(instance, [pid]), 60)
        instance.until_settled()
        assert chat(instance.url, max_tokens=1200) == whole


def test_it_is_served_by_a_folder_of_llama_cpps_own(tmp_path: Path) -> None:
    """The file names the folder as it stands beside it; no package is imported."""
    package = find_spec("xllamacpp")
    assert package is not None and package.origin is not None
    (tmp_path / "build").mkdir()
    library = tmp_path / "build" / "libllama.so"
    library.symlink_to(Path(package.origin).with_name("xllamacpp.abi3.so"))
    entry = model(write_tiny_gguf(tmp_path / "tiny.gguf", float32=True))
    own = {**entry, "options": {**entry["options"], "library": "build"}}
    with Instance.up(tmp_path, [own, {**entry, "name": "p"}]) as instance:
        instance.until_settled()
        assert chat(instance.url) == chat(instance.url, model="p")
        info = instance.model("m").info
        assert info is not None and info.detail.startswith("llama.cpp 0.")


@pytest.mark.lane("long")
def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", architecture="oddformer")
    with Instance.begun(tmp_path, [model(path)]) as instance:
        assert instance.wait() != 0  # no model is left to serve
        assert "unknown model architecture: 'oddformer'" in instance.log


@pytest.mark.lane("models")
@pytest.mark.model
def test_smollm2_answers(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [model(SMOLLM2)]) as instance:
        instance.until_settled(120)
        url = instance.url
        question = [{"role": "user", "content": "Name the capital of Germany in one word."}]
        text = "".join(streamed(url, messages=question, max_tokens=40))
        assert text == chat(url, messages=question, max_tokens=40)
        assert "Berlin" in text
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        found = json.loads(chat(url, messages=question, response_format=wanted))
        assert set(found) == {"city"}


@pytest.mark.lane("long")
def test_a_quantisation_of_the_hub(tmp_path: Path) -> None:
    """As people paste it; one that is not there is said where the model is looked for."""
    data = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    files = dict.fromkeys(("tiny-Q8_0.gguf", "mmproj-tiny-Q8_0.gguf"), data)
    models = [model("hf.co/test/tiny:Q8_0"), model("test/tiny:Q4_0", name="missing")]
    with hub_server({"a" * 40: files}, {"main": "a" * 40}) as (url, _):
        env = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        with Instance.up(tmp_path, models, env=env) as instance:
            instance.until_settled()
            assert chat(instance.url, max_tokens=4)
            assert instance.replica("m/0").state == "ready"
            poll(
                "its reason",
                lambda: "test/tiny has no Q4_0; its quantisations: Q8_0." in instance.log,
            )
