"""Headers of model files, as if fetched: sparse files that the readers of local files read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from servekit.engines.model_files import remote_headers
from servekit.engines.model_files.remote_headers import write_header, write_headers
from servekit.errors import LoadError
from servekit.model_metadata import gguf
from tests.unit.engines.origins import Handler, http_server, hub_server, write_tiny_gguf

COMMIT = "a" * 40


def serve(content: bytes) -> tuple[list[int], Callable[[int], bytes]]:
    """A fetch of `content`, and the lengths that were asked for."""
    asked: list[int] = []

    def fetch(length: int) -> bytes:
        asked.append(length)
        return content[:length]

    return asked, fetch


def safetensors(header_bytes: int, tensor_bytes: int = 10_000_000) -> bytes:
    tensor = {"dtype": "F32", "shape": [tensor_bytes // 4], "data_offsets": [0, tensor_bytes]}
    header = json.dumps({"weight": tensor}).encode().ljust(header_bytes)
    return struct.pack("<Q", len(header)) + header + bytes(tensor_bytes)


def test_a_header_is_fetched_and_the_rest_is_a_hole(tmp_path: Path) -> None:
    content = safetensors(100)
    asked, fetch = serve(content)
    path = tmp_path / "model.safetensors"
    write_header(path, len(content), fetch)
    assert asked == [64 * 2**10]
    assert path.stat().st_size == len(content)
    assert path.stat().st_blocks * 512 < 2**20
    assert path.read_bytes()[:108] == content[:108]


def test_a_long_header_is_fetched_with_its_length(tmp_path: Path) -> None:
    content = safetensors(200_000)
    asked, fetch = serve(content)
    write_header(tmp_path / "model.safetensors", len(content), fetch)
    assert asked == [64 * 2**10, 200_008]
    whole = safetensors(64 * 2**10 - 8)
    asked, fetch = serve(whole)
    write_header(tmp_path / "model.safetensors", len(whole), fetch)
    assert asked == [64 * 2**10], "that was just enough"


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 2**40) + b"{}"])
def test_a_header_without_an_end_is_an_error(tmp_path: Path, content: bytes) -> None:
    asked, fetch = serve(content)
    with pytest.raises(LoadError, match=r"^the header of model\.safetensors cannot be read$"):
        write_header(tmp_path / "model.safetensors", len(content), fetch)
    assert len(asked) < 4


def test_a_header_of_gguf_is_fetched_until_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(remote_headers._FIRST_BYTES, "gguf", 1000)
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    asked, fetch = serve(source.read_bytes())
    (tmp_path / "found").mkdir()
    path = tmp_path / "found" / "Model.GGUF"
    write_header(path, source.stat().st_size, fetch)
    assert asked[:2] == [1000, 4000] and asked[-1] < source.stat().st_size
    assert gguf.read_gguf(path) == gguf.read_gguf(source)
    assert [one.name for one in path.parent.iterdir()] == ["Model.GGUF"], "and nothing beside it"


def test_small_files_are_whole_and_others_only_exist(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json", "modules.json"):
        _, fetch = serve(b'{"a": 1}')
        write_header(tmp_path / name, 8, fetch)
        assert (tmp_path / name).read_bytes() == b'{"a": 1}'
    asked, fetch = serve(b'{"a": 1}')
    write_header(tmp_path / "tokenizer.json", 8, fetch)
    assert asked == [] and (tmp_path / "tokenizer.json").read_bytes() == bytes(8)


@pytest.fixture
def _hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(url: str) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    return use


def test_files_of_a_repository_are_written_below_a_folder(
    tmp_path: Path, _hub: Callable[[str], None]
) -> None:
    files = {"config.json": b'{"a": 1}', "unet/model.safetensors": safetensors(50, 4000)}
    sizes = {name: len(content) for name, content in files.items()}
    with hub_server({COMMIT: files}, {"main": COMMIT}) as (url, asked):
        _hub(url)
        write_headers("test/tiny", sizes, list(files), COMMIT, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == b'{"a": 1}'
    assert (tmp_path / "unet/model.safetensors").stat().st_size == sizes["unet/model.safetensors"]
    assert sorted(one for one in asked if "resolve" in one) == [
        f"GET /test/tiny/resolve/{COMMIT}/config.json",
        f"GET /test/tiny/resolve/{COMMIT}/unet/model.safetensors",
    ]


def test_no_more_is_read_than_was_asked_for(tmp_path: Path, _hub: Callable[[str], None]) -> None:
    ranges: list[str | None] = []

    def answer(handler: Handler) -> None:
        ranges.append(handler.headers.get("Range"))
        handler.send(200, b"x" * 5000, "application/octet-stream")

    with http_server(answer) as (url, _):
        _hub(url)
        found = remote_headers._fetch_start("test/tiny", "a.bin", "main", 100)
    assert found == b"x" * 100, "though the server has no byte ranges"
    assert ranges == ["bytes=0-99"]


def test_a_refusal_of_the_hub_is_an_error(tmp_path: Path, _hub: Callable[[str], None]) -> None:
    with hub_server({COMMIT: {}}, {"main": COMMIT}) as (url, _):
        _hub(url)
        with pytest.raises(Exception, match="404"):
            write_headers("test/tiny", {"config.json": 1}, ["config.json"], COMMIT, tmp_path)
