"""The files of models in the caches: their sources, sizes and removal."""

from __future__ import annotations

import json
from pathlib import Path

from servekit.cli.model_files import disk


def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}


def fill(tmp_path: Path) -> None:
    """A model of the hub with one blob, its conversion, and a wheel's file."""
    repo = tmp_path / "hf" / "hub" / "models--org--name"
    blob, snapshot = repo / "blobs" / "b", repo / "snapshots" / "c1"
    for there in (blob.parent, snapshot):
        there.mkdir(parents=True)
    blob.write_bytes(b"x" * 100)
    (snapshot / "model.safetensors").symlink_to(blob)
    models = tmp_path / "servekit" / "models"
    for folder, identity, size in (
        ("n-1", ["gguf 3", "hub", "org/name", "c1", "f.gguf"], 30),
        ("w-1", ["fetched", "pypi", "pkg", "1.0", "m.gguf"], 7),
    ):
        (models / folder).mkdir(parents=True)
        (models / folder / "data").write_bytes(b"x" * size)
        (models / folder / ".servekit.json").write_text(json.dumps({"identity": identity}))
    (models / ".pins").mkdir()
    (models / ".pins" / "p.json").write_text(json.dumps({"repo": "org/name"}))


def test_each_source_is_listed_once_with_all_its_files(tmp_path: Path) -> None:
    fill(tmp_path)
    stored = {one.source: one for one in disk.list_stored(environ(tmp_path))}
    assert set(stored) == {"org/name", "pkg==1.0"}
    marker = (tmp_path / "servekit/models/n-1/.servekit.json").stat().st_size
    assert stored["org/name"].size_bytes == 100 + 30 + marker, "links are not counted twice"


def test_a_models_path_leads_to_its_files(tmp_path: Path) -> None:
    fill(tmp_path)
    stored = disk.list_stored(environ(tmp_path))
    for path in ("org/name", "org/name:Q4_K_M", "org/name/f.gguf", "pypi:pkg==1.0/m.gguf"):
        assert disk.size_of(path, stored), path
    assert disk.size_of("org/other", stored) is None
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "a").write_bytes(b"12345")
    assert disk.size_of(str(tmp_path / "local"), stored) == 5


def test_removal_takes_one_source_and_its_pins(tmp_path: Path) -> None:
    fill(tmp_path)
    found = next(one for one in disk.list_stored(environ(tmp_path)) if one.source == "org/name")
    disk.remove_files(found, environ(tmp_path))
    assert [one.source for one in disk.list_stored(environ(tmp_path))] == ["pkg==1.0"]
    assert not list(tmp_path.rglob("p.json"))
