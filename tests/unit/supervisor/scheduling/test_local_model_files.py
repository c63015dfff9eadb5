"""Finding a model's files where they may be, without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servekit.engines.model_files.cache import MARKER, Key, Marker
from servekit.supervisor.scheduling.local_model_files import find_model_files


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def snapshot(tmp_path: Path, commit: str) -> Path:
    repo = tmp_path / "cache/huggingface/hub/models--org--name"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir(exist_ok=True)
    return repo


def test_what_is_local_is_where_it_says(tmp_path: Path, environ: dict[str, str]) -> None:
    assert find_model_files(str(tmp_path), None, environ) == tmp_path
    assert find_model_files(str(tmp_path / "nowhere"), None, environ) is None


def test_a_hub_id_is_looked_up_by_its_refs(tmp_path: Path, environ: dict[str, str]) -> None:
    assert find_model_files("org/name", None, environ) is None
    repo = snapshot(tmp_path, "abc")
    assert find_model_files("org/name", None, environ) is None
    (repo / "refs/main").write_text("abc\n")
    assert find_model_files("org/name", None, environ) == repo / "snapshots/abc"
    assert find_model_files("org/name", "abc", environ) == repo / "snapshots/abc"
    assert find_model_files("org/name", "v1", environ) is None
    assert find_model_files("org/name/x.gguf", None, environ) is None
    (repo / "snapshots/abc/x.gguf").touch()
    assert find_model_files("org/name/x.gguf", None, environ) == repo / "snapshots/abc/x.gguf"


def test_the_commit_that_workers_agreed_upon_goes_first(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    repo = snapshot(tmp_path, "old")
    snapshot(tmp_path, "new")
    (repo / "refs/main").write_text("new")
    pins = tmp_path / "cache/servekit/models/.pins"
    pins.mkdir(parents=True)
    pin = {"repo": "org/name", "revision": "main", "commit": "old", "files": ["config.json"]}
    (pins / "x.json").write_text(json.dumps(pin))
    assert find_model_files("org/name", None, environ) == repo / "snapshots/old"


def test_a_quantisation_is_looked_up_among_the_files(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    repo = snapshot(tmp_path, "abc")
    (repo / "refs/main").write_text("abc")
    assert find_model_files("org/name:Q4_0", None, environ) is None
    for name in ("x-Q4_0.gguf", "mmproj-Q8_0.gguf", "Q5_0/x-00001-of-00002.gguf"):
        (repo / "snapshots/abc" / name).parent.mkdir(exist_ok=True)
        (repo / "snapshots/abc" / name).touch()
    assert find_model_files("org/name:Q4_0", None, environ) == repo / "snapshots/abc/x-Q4_0.gguf"
    assert find_model_files("org/name:Q8_0", None, environ) is None
    assert find_model_files("org/name:Q5_0", None, environ) is None  # a part is missing
    pins = tmp_path / "cache/servekit/models/.pins"
    pins.mkdir(parents=True)
    (snapshot(tmp_path, "old") / "snapshots/old/x-Q4_0.gguf").touch()
    pin = {"repo": "org/name", "revision": "main", "commit": "old", "files": ["x-Q4_0.gguf"]}
    (pins / "x.json").write_text(json.dumps(pin))
    assert find_model_files("org/name:Q4_0", None, environ) == repo / "snapshots/old/x-Q4_0.gguf"


def test_the_hub_s_own_variables_count(tmp_path: Path, environ: dict[str, str]) -> None:
    repo = snapshot(tmp_path, "abc")
    (repo / "refs/main").write_text("abc")
    elsewhere = {"HOME": "/nowhere", "HF_HUB_CACHE": str(repo.parent)}
    assert find_model_files("org/name", None, elsewhere) == repo / "snapshots/abc"
    elsewhere = {"HOME": "/nowhere", "HF_HOME": str(repo.parent.parent)}
    assert find_model_files("org/name", None, elsewhere) == repo / "snapshots/abc"


def test_a_wheels_file_is_found_by_the_marks_of_the_cache(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    import msgspec

    identity = ("fetched", "pypi", "some-package", "1.0", "a/b.gguf")
    entry = tmp_path / "cache/servekit/models" / Key("x", identity).name
    entry.mkdir(parents=True)
    (entry / MARKER).write_bytes(msgspec.json.encode(Marker(identity, {"b.gguf": 0})))
    (entry / "b.gguf").touch()
    assert find_model_files("pypi:Some_Package==1.0/a/b.gguf", None, environ) == entry / "b.gguf"
    assert find_model_files("pypi:some-package==2.0/a/b.gguf", None, environ) is None
