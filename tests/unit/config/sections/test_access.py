"""Keys, TLS and limits in a configuration file, and what is said about those that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.config.load import load_config
from servekit.config.schema import Config
from servekit.errors import ConfigError
from tests.api_keys import new_key
from tests.integration.certificates import make

_, HASH = new_key("alice")


def config(folder: Path, **sections: Any) -> Config:
    models = [{"name": "m", "path": "-", "engine": "echo", "aliases": ["alias"]}]
    path = folder / "a.yaml"
    path.write_text(json.dumps({"models": models, **sections}))
    return load_config(path)


def test_all_there_is(tmp_path: Path) -> None:
    make(tmp_path)
    found = config(
        tmp_path,
        keys=[
            {"name": "alice", "hash": HASH, "models": ["alias"], "requests_per_minute": 5},
            {"name": "bob", "file": "bob.key", "admin": True, "priority": -2},
            {"name": "ci", "environment": "CI_KEY", "tokens_per_minute": 9, "max_concurrent": 1},
        ],
        server={
            "tls": {"certificate": "server.pem", "key": "server.key"},
            "cors": ["https://a.example", "http://localhost:3000", "*"],
            "limits": {"messages": 10},
            "legacy": "huixiangdou",
            "legacy_port": 8888,
        },
        logging={"prompts": True},
    )
    assert found.keys[1].file == tmp_path / "bob.key"
    assert found.server.tls is not None
    assert found.server.tls.key == tmp_path / "server.key"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"keys": [{"name": "a"}]}, "keys[0]: a key has exactly one of"),
        ({"keys": [{"name": "a", "hash": HASH, "environment": "A"}]}, "exactly one of"),
        ({"keys": [{"name": "a", "hash": "sk-a-123"}]}, "this is a key, not the hash of one"),
        ({"keys": [{"name": "a b", "hash": HASH}]}, "keys[0].name: a key's name is"),
        ({"keys": [{"name": "a", "hash": HASH}] * 2}, "keys[1].name: two keys are named 'a'"),
        (
            {"keys": [{"name": name, "hash": HASH} for name in "ab"]},
            "keys[1].hash: the same as that of 'a'; each name needs a key of its own",
        ),
        (
            {"keys": [{"name": name, "environment": "KEY"} for name in "ab"]},
            "keys[1].environment: the same as that of 'a'",
        ),
        (
            {"keys": [{"name": "a", "hash": HASH, "models": ["m", "nope"]}]},
            "keys[0].models[1]: no model is called 'nope'; there are: alias, m",
        ),
        (
            {"keys": [{"name": str(i), "hash": HASH} for i in range(4)]},
            "more than 3 hashes begin with sk-alice-",
        ),
        ({"keys": [{"name": "a", "hash": HASH, "requests_per_minute": 0}]}, "at least 1"),
        ({"server": {"tls": {"certificate": "no.pem", "key": "no.key"}}}, "no.pem: does not exist"),
        ({"server": {"tls": {"certificate": "no.pem"}}}, "server.tls"),
        ({"server": {"cors": ["a.example"]}}, "server.cors[0]"),
        ({"server": {"cors": ["https://a.example/page"]}}, "server.cors[0]"),
        ({"server": {"legacy_port": 8888}}, "only `legacy: huixiangdou` has a port"),
        ({"server": {"legacy": "huixiangdou", "legacy_port": 8000}}, "it is `port` already"),
        ({"server": {"limits": {"messages": 5000}}}, "at most 4096"),
        ({"loging": {}}, "Did you mean 'logging'?"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, **sections)
    assert said in error.value.message
    assert HASH not in error.value.message
    assert "sk-a-123" not in error.value.message


def test_an_expired_certificate_is_an_error_of_the_file(tmp_path: Path) -> None:
    make(tmp_path, days=(-9, -1))
    with pytest.raises(ConfigError, match=r"a\.yaml:1:\d+: server\.tls: .* has expired\."):
        config(tmp_path, server={"tls": {"certificate": "server.pem", "key": "server.key"}})
