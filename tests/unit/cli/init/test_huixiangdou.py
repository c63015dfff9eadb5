"""HuixiangDou's config.ini, as its versions have it, into a configuration of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cli.init.huixiangdou import convert_config
from servekit.config.load import load_config
from servekit.config.schema import Config
from servekit.errors import ConfigError

OTHERS = """
[feature_store]
reject_throttle = -1.0
work_dir = "workdir"

[web_search]
domain_partial_order = ["openai.com", "pytorch.org"]

[worker.time]
start = "00:00:00"

[sg_search.mmpose]
introduction = "一个姿态估计工具箱"
"""
BOTH = """
[llm]
enable_local = 1
enable_remote = 0
client_url = "http://127.0.0.1:8888/inference"

[llm.server]
local_llm_path = "internlm/internlm2-chat-7b"
local_llm_max_text_length = 3000
local_llm_bind_port = 8888
remote_type = "kimi"
remote_api_key = "sk-secret-of-theirs"
remote_llm_max_text_length = 128000
remote_llm_model = "auto"
rpm = 500
"""
TODAY = """
[llm]

[llm.server]
remote_type = "vllm"
remote_api_key = "EMPTY"
remote_llm_max_text_length = 32000
remote_llm_model = "vllm"
rpm = 500
tpm = 200000
"""


def converted(folder: Path, text: str) -> tuple[Config, str, tuple[str, ...]]:
    ini, ours = folder / "config.ini", folder / "ours.yaml"
    ini.write_text(OTHERS + text)
    carried = convert_config(ini)
    ours.write_text(carried.text)
    return load_config(ours), carried.text, carried.left_out


def test_local_and_remote(tmp_path: Path) -> None:
    config, text, left_out = converted(tmp_path, BOTH)
    [model] = config.models
    assert (model.name, model.path) == ("internlm2-chat-7b", "internlm/internlm2-chat-7b")
    assert model.max_context is None  # its length is one of characters
    assert "local_llm_max_text_length = 3000" in text
    assert (model.sampling.temperature, model.sampling.max_tokens) == (0, 512)
    assert not model.trust_remote_code
    assert (config.server.legacy, config.server.legacy_port) == ("huixiangdou", 8888)
    assert config.server.host == "127.0.0.1"
    said = [line.partition(":")[0] for line in left_out if line.startswith("llm.")]
    of_others = ("type", "api_key", "llm_max_text_length", "llm_model")
    assert said == [*(f"llm.server.remote_{key}" for key in of_others), "llm.server.rpm"]
    assert any("trust_remote_code" in line for line in left_out)
    assert not any("max_context" in line or "tokens_per" in line for line in left_out)
    assert any("remote_llm_max_text_length: it is how many characters" in line for line in left_out)
    assert "sk-secret-of-theirs" not in text + "".join(left_out)
    assert text.count("#") > 8


def test_a_folder_is_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "models" / "My Model").mkdir(parents=True)
    config, _, _ = converted(
        tmp_path, BOTH.replace("internlm/internlm2-chat-7b", "./models/My Model")
    )
    assert config.models[0].path == str(tmp_path / "models" / "My Model")
    assert config.models[0].name == "my-model"


@pytest.mark.parametrize(
    ("change", "port"),
    [
        ({"local_llm_bind_port = 8888": ""}, 8888),
        ({"local_llm_bind_port = 8888": "", "1:8888": "1:7777"}, 7777),
        ({"local_llm_bind_port = 8888": "local_llm_bind_port = 8000"}, 8000),
        ({"local_llm_max_text_length = 3000": ""}, 8888),
        ({"local_llm_bind_port = 8888": 'local_llm_bind_port = "x"'}, 8888),
    ],
)
def test_keys_that_are_missing_or_odd(tmp_path: Path, change: dict[str, str], port: int) -> None:
    text = BOTH
    for old, new in change.items():
        text = text.replace(old, new)
    config, _, _ = converted(tmp_path, text)
    assert config.server.legacy_port == port != config.server.port
    assert config.models[0].max_context is None


def test_what_is_new_there_is_named(tmp_path: Path) -> None:
    _, _, left_out = converted(tmp_path, BOTH + 'local_llm_quant = 4\nsomething = "new"\n')
    assert "llm.server.something: not known here" in left_out
    assert "llm.server.local_llm_quant: not known here" in left_out


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    ini = tmp_path / "config.ini"
    ini.write_text(BOTH.replace("internlm/internlm2-chat-7b", "/no/such/folder"))
    carried = convert_config(ini)
    assert '"/no/such/folder"' in carried.text
    assert any("/no/such/folder: does not exist" in line for line in carried.left_out)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TODAY, "has no local_llm_path"),
        ("[feature_store]\n", r"has no \[llm\]"),
        ("[llm]\n", r"has no \[llm\.server\]"),
        ("[llm]\nserver = 3\n", r"has no \[llm\.server\]"),
        ("key: value\n", "is not TOML"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, text: str, said: str) -> None:
    ini = tmp_path / "config.ini"
    ini.write_text(text)
    with pytest.raises(ConfigError, match=said):
        convert_config(ini)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        convert_config(tmp_path / "none.ini")
    (tmp_path / "b.ini").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        convert_config(tmp_path / "b.ini")
