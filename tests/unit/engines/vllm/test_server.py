"""The flags of `vllm serve`, and the checks before it is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.vllm import server
from servekit.errors import LoadError
from servekit.protocol.adapters import AdapterSpec
from tests.unit.engines.harness import make_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"hidden_size": 32, "max_position_embeddings": 2048, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def flags(folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> list[str]:
    monkeypatch.setattr(server, "_has_command", lambda: True)
    spec = make_spec(folder, engine="vllm", device="cpu", **fields)
    return server.make_flags(spec, folder, embeds=False)


def test_the_model_comes_first_and_its_settings_are_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = {"kv_cache_dtype": "fp8", "speculative_config": {"method": "ngram"}}
    options = {"slots": 3, "max_loras": 2, "quantization": "fp8", "engine_args": passed}
    found = flags(folder, monkeypatch, options=options, max_context=512, tool_parser="glm")
    assert found[:2] == [str(folder), "--served-model-name=model"]
    assert {
        *("--max-model-len=512", "--dtype=float32", "--max-num-seqs=3", "--enforce-eager"),
        *("--tensor-parallel-size=1", "--enable-prefix-caching", "--quantization=fp8"),
        *("--kv-cache-dtype=fp8", '--speculative-config={"method": "ngram"}'),
        *("--enable-auto-tool-choice", "--tool-call-parser=glm45"),
    } <= set(found)
    names = {word.partition("=")[0] for word in found}
    assert not names & {"--model", "--enable-lora", "--max-loras", "--structured-outputs-config"}


def test_a_chat_template_is_passed_as_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "{{ messages }}\n{path}"
    socket = str(folder / "w.sock")
    assert f"--chat-template={socket}.jinja" in flags(
        folder, monkeypatch, chat_template=text, socket=socket
    )
    assert (folder / "w.sock.jinja").read_text() == text


def test_placeholders_in_flags_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.VllmServerEngine(make_spec(folder, engine="vllm"))
    monkeypatch.setattr(server, "_has_command", lambda: True)
    engine._options = server.make_command_options({}, embeds=False)
    engine._flags = ["/models/{name}", "--seed=1"]
    words, origin = engine._fill_command(lambda progress: None)
    port = origin.rpartition(":")[2]
    assert words == [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
        *("/models/{name}", "--seed=1", "--host=127.0.0.1", f"--port={port}"),
    ]


def test_adapters_are_refused() -> None:
    spec = make_spec("/m", engine="vllm", adapters=(AdapterSpec("a", "/a"),))
    with pytest.raises(LoadError, match="with which servekit has no adapters"):
        server.VllmServerEngine(spec).load(lambda progress: None)


def test_arguments_of_servekit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match="servekit sets max_num_seqs itself: write `slots`"):
        flags(folder, monkeypatch, options={"engine_args": {"max_num_seqs": 1}})


def test_a_key_for_each_start_guards_the_server_and_goes_with_each_request(folder: Path) -> None:
    engine = server.VllmServerEngine(make_spec(folder, engine="vllm", device="cpu"))
    engine._options, engine._flags = server.make_command_options({}, embeds=False), []
    words, engine._origin = engine._fill_command(lambda progress: None)
    key = engine._make_environment()["VLLM_API_KEY"]
    assert len(key) > 20 and not any(key in word for word in words)  # others can read a command
    assert engine._make_address().key == key
