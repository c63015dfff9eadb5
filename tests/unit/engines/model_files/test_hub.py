"""Models of the hub: the real huggingface_hub against a hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from servekit.engines.model_files.cache import Cache
from servekit.engines.model_files.source import resolve_folder
from servekit.protocol.messages import Progress
from tests.unit.engines.origins import hub_server, outcome, start_resolving, write_tiny_gguf
from tests.unit.model_metadata.ctranslate2_file import write_model

OLD, NEW = "a" * 40, "b" * 40
NOWHERE = "http://127.0.0.1:1"
Resolve = Callable[..., tuple[dict[str, Any], str]]


def ignore(_: Progress) -> None:
    pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a model's repository holds, and what one also finds there."""
    folder = tmp_path_factory.mktemp("tiny")
    path = write_tiny_gguf(folder / "tiny.gguf")
    converted = resolve_folder(str(path), None, ignore, cache=Cache(folder / "cache"))
    model = {p.name: p.read_bytes() for p in converted.iterdir() if p.name != ".servekit.json"}
    rest = ["pytorch_model.bin", "README.md", "onnx/model.onnx", "original/model.safetensors"]
    code = {"modeling_tiny.py": b"1 / 0"}
    gguf = {"tiny.gguf": path.read_bytes()}
    return model | dict.fromkeys((*rest, "consolidated.safetensors"), b"x") | code | gguf


@pytest.fixture
def run(tmp_path: Path) -> Resolve:
    def resolve_it(
        path: str,
        url: str,
        revision: str = "",
        limit_bytes: int | None = None,
        kind: Literal["folder", "file", "adapter", "ctranslate2"] = "folder",
        **more: str,
    ) -> Any:
        home = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": url, "HF_TOKEN": "secret"}
        clean = {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment = home | clean | more
        return outcome(
            start_resolving(
                *(path, tmp_path),
                revision=revision,
                environment=environment,
                limit_bytes=limit_bytes,
                kind=kind,
            )
        )

    return resolve_it


def test_only_what_serving_needs_is_fetched(files: dict[str, bytes], run: Resolve) -> None:
    with hub_server({OLD: files}, {"main": OLD}) as (url, _):
        found, logged = run("test/tiny", url)
    folder = Path(found["path"])
    assert folder.name == OLD
    assert "hub_commit_" in logged and f"commit={OLD}" in logged
    assert {p.name for p in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }


def test_replicas_serve_the_commit_of_the_first_whatever_is_pushed(
    files: dict[str, bytes], run: Resolve
) -> None:
    refs = {"main": OLD}
    with hub_server({OLD: files, NEW: files | {"config.json": b"{}"}}, refs) as (url, asked):
        first, _ = run("test/tiny", url)
        refs["main"] = NEW
        asked.clear()
        second, logged = run("test/tiny", url)
    assert first == second and asked == []
    assert "hub_commit_pinned" in logged and ".pins" in logged


@pytest.mark.lane("long")
def test_a_commit_or_tag_is_what_is_served(files: dict[str, bytes], run: Resolve) -> None:
    with hub_server({OLD: files, NEW: files}, {"main": NEW, "v1": OLD}) as (url, asked):
        assert Path(run("test/tiny", url, "v1")[0]["path"]).name == OLD
        assert Path(run("test/tiny", url)[0]["path"]).name == NEW
        assert Path(run("test/tiny", url, NEW)[0]["path"]).name == NEW
        asked.clear()
        assert Path(run("test/tiny", url, NEW)[0]["path"]).name == NEW
    assert asked == []


def test_a_cached_model_is_served_without_the_hub(
    files: dict[str, bytes], run: Resolve, tmp_path: Path
) -> None:
    with hub_server({OLD: files}, {"main": OLD}) as (url, _):
        first, _ = run("test/tiny", url)
    for pin in (tmp_path / "servekit" / "models" / ".pins").iterdir():
        pin.unlink()  # as if another program had filled the hub's cache
    second, logged = run("test/tiny", NOWHERE)
    assert first == second and "hub_unreachable" in logged


@pytest.mark.lane("long")
@pytest.mark.parametrize("pinned", [True, False])
def test_offline_mode_is_honoured(
    files: dict[str, bytes], run: Resolve, tmp_path: Path, pinned: bool
) -> None:
    with hub_server({OLD: files}, {"main": OLD}) as (url, asked):
        first, _ = run("test/tiny", url)
        if not pinned:
            next((tmp_path / "servekit" / "models" / ".pins").iterdir()).unlink()
        asked.clear()
        second, _ = run("test/tiny", url, HF_HUB_OFFLINE="1")
        missing, _ = run("test/other", url, HF_HUB_OFFLINE="1")
    assert first == second and asked == []
    assert "HF_HUB_OFFLINE is set and test/other at main is not whole" in missing["error"]


def test_a_file_lost_from_the_cache_is_fetched_again(files: dict[str, bytes], run: Resolve) -> None:
    with hub_server({OLD: files, NEW: files}, refs := {"main": OLD}) as (url, _):
        folder = Path(run("test/tiny", url)[0]["path"])
        (folder / "tokenizer.json").unlink()
        refs["main"] = NEW
        assert Path(run("test/tiny", url)[0]["path"]) == folder
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("path", ["test/tiny", "test/tiny/tiny.gguf"])
def test_a_file_that_a_crash_has_shortened_is_fetched_again(
    files: dict[str, bytes], run: Resolve, path: str
) -> None:
    kind: Literal["folder", "file"] = "folder" if path == "test/tiny" else "file"
    with hub_server({OLD: files}, {"main": OLD}) as (url, _):
        found, _ = run(path, url, kind=kind)
        name = "model.safetensors" if kind == "folder" else "tiny.gguf"
        file = Path(found["path"]) / name if kind == "folder" else Path(found["path"])
        file.write_bytes(b"")
        lost, _ = run(path, NOWHERE, kind=kind)
        again, logged = run(path, url, kind=kind)
    assert not lost["permanent"]
    assert again == found and file.read_bytes() == files[name]
    assert "hub_file_damaged" in logged


def test_a_file_of_another_size_than_the_listed_one_is_not_kept(
    files: dict[str, bytes], run: Resolve, tmp_path: Path
) -> None:
    """As from a proxy that answers with its own page."""
    with hub_server({OLD: files}, {"main": OLD}, pages={"model.safetensors"}) as (url, _):
        found, _ = run("test/tiny", url)
    assert "The hub lists test/tiny's model.safetensors with " in found["error"]
    assert not found["permanent"]
    assert not list((tmp_path / "hf").rglob("model.safetensors"))


def test_an_edited_template_is_kept(files: dict[str, bytes], run: Resolve) -> None:
    with hub_server({OLD: files}, {"main": OLD}) as (url, _):
        template = Path(run("test/tiny", url)[0]["path"]) / "chat_template.jinja"
        template.write_text("mine")
        (template.parent / "tokenizer.json").unlink()
        run("test/tiny", url)
    assert (template.parent / "tokenizer.json").is_file() and template.read_text() == "mine"


def test_a_hub_that_asks_for_patience_is_told_as_such(
    files: dict[str, bytes], run: Resolve
) -> None:
    with hub_server({OLD: files}, {"main": OLD}, status=403) as (url, _):
        found, _ = run("test/tiny", url)
    assert "403 Forbidden" in found["error"] and "\n" not in found["error"]
    assert not found["permanent"]


def test_a_garbled_pin_is_made_anew(files: dict[str, bytes], run: Resolve, tmp_path: Path) -> None:
    with hub_server({OLD: files}, {"main": OLD}) as (url, _):
        first, _ = run("test/tiny", url)
        [pin] = (tmp_path / "servekit" / "models" / ".pins").iterdir()
        pin.write_bytes(b'{"repo":"\xff"}')  # invalid UTF-8
        assert run("test/tiny", url)[0] == first


def test_an_incomplete_cache_is_not_served(
    files: dict[str, bytes], run: Resolve, tmp_path: Path
) -> None:
    with hub_server({OLD: files}, {"main": OLD}) as (url, _):
        (Path(run("test/tiny", url)[0]["path"]) / "model.safetensors").unlink()
    found, _ = run("test/tiny", NOWHERE)
    assert "The hub cannot be reached for test/tiny at main" in found["error"]
    assert not found["permanent"]


def test_code_comes_along_only_for_those_who_trust_it(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_server({OLD: files}, {"main": OLD}) as (url, _):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        for trust in (False, True):
            cache = Cache(tmp_path / "cache")
            folder = resolve_folder("test/tiny", None, ignore, trust_remote_code=trust, cache=cache)
            assert (folder / "modeling_tiny.py").is_file() == trust


def test_what_follows_an_embedding_models_transformer_comes_along(
    files: dict[str, bytes], run: Resolve
) -> None:
    modules = {
        "modules.json": b"[]",
        "sentence_bert_config.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": files["model.safetensors"],
    }
    others = {"onnx/model.onnx": b"x", "2_Dense/pytorch_model.bin": b"x"}
    with hub_server({OLD: files | modules | others}, {"main": OLD}) as (url, _):
        folder = Path(run("test/tiny", url)[0]["path"])
    assert all((folder / name).is_file() for name in modules)
    assert not any((folder / name).exists() for name in others)


@pytest.mark.lane("models")
def test_a_gguf_file_of_the_hub_is_converted(files: dict[str, bytes], run: Resolve) -> None:
    with hub_server({OLD: files}, {"main": OLD}) as (url, asked):
        found, _ = run("test/tiny/tiny.gguf", url)
        missing, _ = run("test/tiny/other.gguf", url)
    assert (Path(found["path"]) / "model.safetensors").is_file()
    assert not [a for a in asked if a.endswith("model.safetensors")]
    assert "test/tiny has no other.gguf; its GGUF files: tiny.gguf" in missing["error"]


GGUFS = ("tiny-UD-Q8_0.gguf", "mmproj-Q8_0.gguf", "README.md")


@pytest.mark.lane("long")
def test_a_quantisation_of_the_hub_is_its_file(
    files: dict[str, bytes], run: Resolve, tmp_path: Path
) -> None:
    repo = dict.fromkeys(GGUFS, files["tiny.gguf"])
    with hub_server({OLD: repo}, {"main": OLD}) as (url, asked):
        found, _ = run("test/tiny:q8_0", url, kind="file")
        missing, _ = run("test/tiny:Q4_K_M", url)
        untold, _ = run("test/tiny", url)
        converted, _ = run("test/tiny:Q8_0", url)
        same, _ = run(f"test/tiny/{GGUFS[0]}", url)
    assert Path(found["path"]).name == GGUFS[0]
    assert not [a for a in asked if "mmproj" in a]
    assert missing["error"] == "test/tiny has no Q4_K_M; its quantisations: UD-Q8_0."
    assert "such as test/tiny:UD-Q8_0; there are: UD-Q8_0." in untold["error"]
    assert missing["permanent"] and untold["permanent"]
    assert converted == same and (Path(same["path"]) / "model.safetensors").is_file()


@pytest.mark.lane("long")
def test_a_quantisation_is_found_in_the_cache(
    files: dict[str, bytes], run: Resolve, tmp_path: Path
) -> None:
    repo = dict.fromkeys(GGUFS, files["tiny.gguf"])
    with hub_server({OLD: repo}, {"main": OLD}) as (url, asked):
        first, _ = run("test/tiny:Q8_0", url, kind="file")
        asked.clear()
        assert run("test/tiny:Q8_0", url, kind="file")[0] == first and asked == []
    for pin in (tmp_path / "servekit" / "models" / ".pins").iterdir():
        pin.unlink()  # as if another program had filled the hub's cache
    second, logged = run("test/tiny:UD-Q8_0", NOWHERE, kind="file")
    assert first == second and "hub_unreachable" in logged
    missing, _ = run("test/tiny:Q4_0", NOWHERE, kind="file")
    assert "Its cached quantisations: UD-Q8_0." in missing["error"] and not missing["permanent"]


@pytest.mark.parametrize(
    "path",
    [
        "test/tiny:Q4_0",
        pytest.param("test/tiny/Q4_0/x-00002-of-00002.gguf", marks=pytest.mark.lane("long")),
    ],
)
def test_all_parts_of_a_gguf_model_are_fetched(run: Resolve, path: str) -> None:
    parts = [f"Q4_0/x-0000{n}-of-00002.gguf" for n in (1, 2)]
    with hub_server({OLD: dict.fromkeys([*parts, "Q8_0/x.gguf"], b"x")}, {"main": OLD}) as (url, _):
        found = Path(run(path, url, kind="file")[0]["path"])
    assert found.name == "x-00001-of-00002.gguf"
    assert sorted(p.name for p in found.parent.iterdir()) == [part[5:] for part in parts]
    assert not (found.parent.parent / "Q8_0").exists()


def test_weights_in_shards_are_all_fetched(files: dict[str, bytes], run: Resolve) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": files["model.safetensors"] for n in (1, 2)}
    index = {"weight_map": dict.fromkeys("ab", "model-00001-of-00002.safetensors")}
    sharded = {n: c for n, c in files.items() if n != "model.safetensors"} | shards
    sharded["model.safetensors.index.json"] = json.dumps(index).encode()
    with hub_server({OLD: sharded}, {"main": OLD}) as (url, _):
        folder = Path(run("test/tiny", url)[0]["path"])
    assert {*shards, "model.safetensors.index.json"} <= {p.name for p in folder.iterdir()}


def test_a_model_of_ctranslate2_is_fetched(run: Resolve, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", a=10)
    names = {"vocabulary.json", "preprocessor_config.json"}
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | dict.fromkeys(
        names, b"{}"
    )
    with hub_server({OLD: files | {"README.md": b"x"}}, {"main": OLD}) as (url, _):
        found, _ = run("test/tiny", url, kind="ctranslate2")
        other, _ = run("test/tiny", url)
    assert "path" in found, found
    assert {path.name for path in Path(found["path"]).iterdir()} == files.keys()
    assert "is a model of CTranslate2: `engine: faster_whisper` loads it" in other["error"]
    again, _ = run("test/tiny", NOWHERE, kind="ctranslate2", HF_HUB_OFFLINE="1")
    assert again == found


def test_a_model_without_safetensors_is_refused_before_it_is_fetched(run: Resolve) -> None:
    old = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with hub_server({OLD: old}, {"main": OLD}) as (url, asked):
        found, _ = run("test/tiny", url)
    assert "only as pytorch_model.bin" in found["error"] and found["permanent"]
    assert not [a for a in asked if "resolve" in a]


@pytest.mark.parametrize(
    ("path", "revision", "gated", "said"),
    [
        ("test/other", "", False, "The hub has no model test/other, or it is private"),
        pytest.param(
            *("test/tiny", "v9", False, "The hub's test/tiny has no revision v9"),
            marks=pytest.mark.lane("long"),
        ),
        ("test/tiny", "", True, "test/tiny is gated: accept its terms"),
    ],
)
def test_what_the_hub_refuses_is_permanent(
    run: Resolve, path: str, revision: str, gated: bool, said: str
) -> None:
    with hub_server({OLD: {}}, {"main": OLD}, gated=gated) as (url, _):
        found, _ = run(path, url, revision)
    assert said in found["error"] and found["permanent"]


def test_a_hub_cache_that_fills_up_is_named(
    files: dict[str, bytes], tmp_path: Path, run: Resolve
) -> None:
    with hub_server({OLD: files}, {"main": OLD}) as (url, _):
        found, _ = run("test/tiny", url, limit_bytes=50_000)
    assert f"The hub's cache {tmp_path}/hf/hub cannot be written" in found["error"]
    assert "HF_HOME" in found["error"] and found["permanent"]


def test_a_hub_that_cannot_be_reached_is_worth_another_try(run: Resolve) -> None:
    found, _ = run("test/tiny", NOWHERE)
    assert "The hub cannot be reached for test/tiny at main, which is not cached" in found["error"]
    assert not found["permanent"]


@pytest.mark.lane("long")
def test_an_adapter_of_the_hub_is_pinned_and_served_without_it(run: Resolve) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x", "README.md": b"x"}
    refs = {"main": OLD}
    with hub_server({OLD: files, NEW: files}, refs) as (url, _):
        found, _ = run("test/tiny", url, kind="adapter")
        refs["main"] = NEW
        again, _ = run("test/tiny", url, kind="adapter")
        other, _ = run("test/tiny", url, revision=NEW, kind="adapter")
    assert Path(found["path"]).name == OLD and again == found
    assert Path(other["path"]).name == NEW
    assert {p.name for p in Path(found["path"]).iterdir()} == files.keys() - {"README.md"}
    assert run("test/tiny", NOWHERE, kind="adapter")[0] == found


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "model.safetensors"], "no adapter_config.json: it is no adapter"),
        (["adapter_config.json", "adapter_model.bin"], "adapter_model.bin, a pickle format"),
    ],
)
def test_what_is_no_adapter_is_not_fetched(run: Resolve, names: list[str], message: str) -> None:
    with hub_server({OLD: dict.fromkeys(names, b"{}")}, {"main": OLD}) as (url, _):
        found, _ = run("test/tiny", url, kind="adapter")
    assert message in found["error"] and found["permanent"]
