"""From the file to what gateways are told: hashes, digests, and no key in the clear."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servekit.config import keys
from servekit.config.schema import Config, ModelConfig, PresetConfig, ServerConfig
from servekit.config.sections.access import KeyConfig
from servekit.supervisor.access_rules import (
    KeyMissing,
    check_handed,
    handed,
    public,
    refuse_link,
    refuse_public,
    rules,
    secret_variables,
)
from tests.api_keys import new_key

KEY, HASH = new_key("alice")
CLEAR = "correct-horse-battery"


def config(*given: KeyConfig, **server: Any) -> Config:
    model = ModelConfig(name="m", path="-", engine="echo", aliases=("alias",))
    return Config(models=(model,), keys=given, server=ServerConfig(**server))


def test_a_hash_goes_as_it_is_and_models_by_their_own_names() -> None:
    key = KeyConfig(name="alice", hash=HASH, models=("alias", "m"), priority=2, admin=True)
    [rule] = rules(config(key), {}).keys
    assert (rule.hash, rule.digest, rule.models) == (HASH, b"", ("m",))
    assert (rule.priority, rule.admin) == (2, True)


def test_a_preset_goes_by_its_own_name() -> None:
    model = ModelConfig(name="m", engine="echo", presets=(PresetConfig(name="fast"),))
    key = KeyConfig(name="alice", hash=HASH, models=("fast",))
    [rule] = rules(Config(models=(model,), keys=(key,)), {}).keys
    assert rule.models == ("fast",)


def test_prefixes_are_each_keys_own_unless_they_are_shared() -> None:
    key = KeyConfig(name="alice", hash=HASH)
    assert rules(config(key), {}).prefixes_by_key
    assert not rules(config(key, prefix_cache="shared"), {}).prefixes_by_key
    assert not rules(config(), {}).prefixes_by_key, "whoever asks is nobody"


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({}, ""),
        ({"host": "::1"}, ""),
        ({"host": "0.0.0.0"}, "others can reach 0.0.0.0, and without TLS"),
        ({"host": "0.0.0.0", "browser_link": True}, ""),
        ({"host": "0.0.0.0", "tls": {"certificate": "/x", "key": "/y"}}, ""),
        ({"browser_link": False}, "`browser_link: false`"),
        ({"ui": False, "browser_link": True}, "there are no pages"),
    ],
)
def test_a_link_is_for_browsers_that_nobody_overhears(server: dict[str, Any], said: str) -> None:
    given = config(KeyConfig(name="alice", hash=HASH), **server)
    why = refuse_link(given)
    assert said in why
    assert bool(said) is bool(why)
    if "tls" not in server:  # whose files would be read
        assert rules(given, {}).browser_link is not bool(said)


def test_clear_keys_go_as_digests(tmp_path: Path) -> None:
    file = tmp_path / "bob.key"
    file.write_text(f"{CLEAR}\nthe second line is a remark\n")
    found = rules(
        config(KeyConfig(name="bob", file=file), KeyConfig(name="ci", environment="CI")),
        {"CI": f" {CLEAR} "},
    )
    wanted = keys.fast_digest(CLEAR.encode(), found.salt)
    assert [rule.digest for rule in found.keys] == [wanted, wanted]
    assert CLEAR.encode() not in msgspec.msgpack.encode(found)
    assert found == rules(config(*_same(file)), {"CI": CLEAR})  # a reload changes nothing


def _same(file: Path) -> tuple[KeyConfig, KeyConfig]:
    return KeyConfig(name="bob", file=file), KeyConfig(name="ci", environment="CI")


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "it is not set, or empty"), ("short", "8 to 512 characters"),
     ("with a blank", "printable ASCII"), ("ünïcödé-key", "printable ASCII")],
)  # fmt: skip
def test_keys_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(KeyMissing, match=said) as missing:
        rules(config(KeyConfig(name="ci", environment="CI")), {"CI": text})
    assert missing.value.at == ("keys", 0, "environment")
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(KeyMissing, match=said):
        rules(config(KeyConfig(name="bob", file=file)), {})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(KeyMissing, match="No such file"):
        rules(config(KeyConfig(name="bob", file=tmp_path / "none")), {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(KeyMissing, match="fifo: not a regular file"):
        rules(config(KeyConfig(name="bob", file=tmp_path / "fifo")), {})
    with pytest.raises(KeyMissing, match="not text"):
        rules(config(KeyConfig(name="bob", file=tmp_path / "binary")), {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert refuse_public(config(host=host)) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1"])
def test_any_other_address_needs_one(host: str) -> None:
    assert host in refuse_public(config(host=host))
    assert refuse_public(config(KeyConfig(name="alice", hash=HASH), host=host)) == ""


def test_variables_that_are_keys() -> None:
    key = KeyConfig(name="ci", environment="CI")
    assert secret_variables(config(key, KeyConfig(name="alice", hash=HASH))) == {"CI"}


def remote(name: str, variable: str | None = None, **env: str) -> ModelConfig:
    options = {"url": "https://api.example.com/v1"}
    options |= {} if variable is None else {"key_environment": variable}
    return ModelConfig(name=name, path="there", engine="openai", options=options, env=env)


def test_an_endpoint_s_key_reaches_its_own_workers_only() -> None:
    one, other, free = remote("one", "ONE_KEY"), remote("other", "OTHER_KEY"), remote("free")
    given = Config(models=(one, other, free), keys=(KeyConfig(name="ci", environment="CI"),))
    environ = {"ONE_KEY": "1", "OTHER_KEY": "2", "CI": CLEAR, "HOME": "/home"}
    assert secret_variables(given) == {"ONE_KEY", "OTHER_KEY", "CI"}
    assert public(environ, given) == {"HOME": "/home"}
    assert handed(environ, one) == {"ONE_KEY": "1"}
    assert handed(environ, other) == {"OTHER_KEY": "2"}
    assert handed(environ, free) == {}
    assert handed({}, one) == {}


def test_what_another_engine_calls_so_is_none() -> None:
    model = ModelConfig(name="m", path="-", engine="echo", options={"key_environment": "HOME"})
    assert handed({"HOME": "/home"}, model) == {}


@pytest.mark.parametrize(
    ("value", "said"),
    [("", "not set, or empty"), (" ", "not set, or empty"), ("a b", "without spaces"),
     ("a\r\nx-evil: 1", "printable ASCII"), ("schlüssel", "printable ASCII")],
)  # fmt: skip
def test_an_endpoint_s_key_that_is_none(value: str, said: str) -> None:
    given = Config(models=(remote("free"), remote("one", "ONE_KEY")))
    with pytest.raises(KeyMissing, match=said) as missing:
        check_handed(given, {"ONE_KEY": value})
    assert missing.value.at == ("models", 1, "options", "key_environment")
    check_handed(given, {"ONE_KEY": "EMPTY"})


def test_a_key_may_stand_in_the_model_s_own_environment() -> None:
    check_handed(Config(models=(remote("one", "ONE_KEY", ONE_KEY="sk-1"),)), {})
