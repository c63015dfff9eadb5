"""What `check` and `doctor` say of models that are not here, with indexes and hubs on loopback."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.engines.model_files import remote_headers
from servekit.model_metadata import gguf
from servekit.supervisor.deployments.plan import Plan, Source
from servekit.supervisor.scheduling.fetch_checks import FetchFinding, look_up, with_estimates
from servekit.supervisor.scheduling.memory_estimator import estimate
from tests.integration.instance import write_config
from tests.unit.engines.origins import Handler, http_server, hub_server, write_tiny_gguf
from tests.unit.model_metadata.ctranslate2_file import write_model
from tests.unit.model_metadata.test_kv_cache_shape import LLAMA_8B
from tests.unit.model_metadata.test_safetensors import write

NAME = "tiny_model-1.0-py3-none-any.whl"
SIZE_BYTES = 3 * 2**20


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this machine's own settings and caches."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "PIP_NO_INDEX",
        "UV_INDEX",
        "UV_EXTRA_INDEX_URL",
    ):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def index(size_bytes: int = SIZE_BYTES, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """An index with version 1.0 of tiny-model."""
    file = {"filename": NAME, "url": f"/files/{NAME}", "hashes": {}, "size": size_bytes}

    def answer(handler: Handler) -> None:
        page = json.dumps({"files": [file]}).encode()
        if status == 200 and handler.path != "/simple/tiny-model/":
            handler.send(404, b"", "text/html")
        else:
            handler.send(status, page, "application/vnd.pypi.simple.v1+json")

    with http_server(answer) as (url, asked):
        yield f"{url.replace('//', '//me:secret@')}/simple", asked


def told(folder: Path, *paths: str, patience_s: float = 60.0) -> list[FetchFinding]:
    models = [
        {"name": f"m{at}", "engine": "llamacpp", "path": path, "memory": "1GiB"}
        for at, path in enumerate(paths)
    ]
    found = look_up(Source(write_config(folder, models)).plan(()), patience_s)
    assert not any("secret" in one.said for one in found)
    return found


def test_versions_that_are_there_and_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index() as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        there, other, none = told(
            tmp_path, "pypi:tiny_model==1.0", "pypi:tiny-model==2.0/a.gguf", "pypi:nobody==1/m"
        )
    assert (there.level, there.place) == ("ok", "models[0].path: m0")
    assert there.said == "tiny-model==1.0 will be fetched: 3 MiB; the disk has room."
    assert other.level == none.level == "error"
    assert "has no tiny-model==2.0: it has 1.0" in other.said
    assert "it has no wheel of nobody" in none.said


def test_a_disk_without_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with index(size_bytes=2**60) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        [found] = told(tmp_path, "pypi:tiny-model==1.0")
    assert (found.level, "are free in" in found.said) == ("warning", True)


@pytest.mark.parametrize("status", [401, 403, 503])
def test_an_index_that_refuses_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with index(status=status) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        [found] = told(tmp_path, "pypi:tiny-model==1.0")
    assert (found.level, str(status) in found.said) == ("warning", True)


def test_an_index_that_is_not_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{port}/simple")
    [found] = told(tmp_path, "pypi:tiny-model==1.0")
    assert (found.level, "cannot be reached" in found.said) == ("warning", True)


def test_an_index_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    with http_server(lambda handler: (over.wait(60), None)[1]) as (url, _):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        found = told(tmp_path, *[f"pypi:tiny-model=={at}" for at in range(3)], patience_s=0.5)
        over.set()
    assert [one.level for one in found] == ["warning"] * 3
    assert "did not answer" in found[0].said


@pytest.mark.parametrize("name", ["PIP_NO_INDEX", "HF_HUB_OFFLINE"])
def test_who_is_offline_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with index() as (url, asked):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv(name, "1")
        [found] = told(tmp_path, "pypi:tiny-model==1.0")
    assert (found.level, name in found.said, asked) == ("warning", True, [])


def test_what_other_machines_fetch_is_not_asked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index() as (url, asked):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        models = [{"name": "m", "engine": "llamacpp", "path": "pypi:tiny-model==2.0"}]
        cluster = {"launcher": "ray", "ray": {"address": "localhost:6379"}}
        plan = Source(write_config(tmp_path, models, None, cluster)).plan(())
        assert (look_up(plan), asked) == ([], [])


def test_what_is_here_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / "cache/servekit/models/tiny"
    entry.mkdir(parents=True)
    identity = ["fetched", "pypi", "tiny-model", "1.0", "m.gguf"]
    (entry / ".servekit.json").write_text(json.dumps({"identity": identity, "files": {}}))
    assert told(tmp_path, "pypi:tiny-model==1.0/m.gguf") == []


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A hub with two quantisations of test/tiny, for this process and its children."""
    files = {"tiny-Q4_0.gguf": b"x" * 2**20, "tiny-Q8_0-00001-of-00002.gguf": b"x"}
    for name, value in {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    with hub_server({"a" * 40: files}, {"main": "a" * 40}) as (url, _):
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield url


@pytest.mark.lane("long")
@pytest.mark.usefixtures("hub")
def test_quantisations_that_are_there_and_that_are_not(tmp_path: Path) -> None:
    there, missing, half, nobody = told(
        tmp_path, "hf.co/test/tiny:q4_0", "test/tiny:Q5_0", "test/tiny:Q8_0", "test/no-GGUF:Q4_0"
    )
    assert (there.level, there.source, there.index) == ("ok", "hub", 0)
    assert there.said == (
        "test/tiny:q4_0 is tiny-Q4_0.gguf, to be fetched: 1 MiB; the disk has room."
    )
    assert missing.level == half.level == nobody.level == "error"
    assert missing.said == "test/tiny has no Q5_0; its quantisations: Q4_0, Q8_0."
    assert half.said == "test/tiny has 1 of the 2 parts of tiny-Q8_0-00001-of-00002.gguf only."
    assert "The hub has no model test/no-GGUF" in nobody.said


@pytest.mark.usefixtures("hub")
def test_check_names_the_line_of_a_quantisation_that_is_not_there(tmp_path: Path) -> None:
    model = {"name": "m", "engine": "llamacpp", "path": "test/tiny:Q5_0", "memory": "1GiB"}
    config = write_config(tmp_path, [model])
    done = subprocess.run(
        [sys.executable, "-m", "servekit", "check", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert re.search(
        rf"{re.escape(str(config))}:\d+:\d+: models\[0\].path: test/tiny has no Q5_0; its ",
        done.stderr,
    )


@pytest.fixture
def whole_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub with a GGUF file on its branch main, and 64 MiB of safetensors on the branch llama."""
    tiny = write_tiny_gguf(tmp_path / "tiny-Q8_0.gguf")
    weights = tmp_path / "model.safetensors"
    write(weights, {"all": ("BF16", [32 * 2**20])})
    config = {**LLAMA_8B, "model_type": "llama", "torch_dtype": "bfloat16"}
    folder = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
        weights.name: weights.read_bytes(),
    }
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    commits = {"a" * 40: {tiny.name: tiny.read_bytes()}, "b" * 40: folder}
    with hub_server(commits, {"main": "a" * 40, "llama": "b" * 40}) as (url, asked):
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield asked


def estimated(folder: Path, **keys: str) -> tuple[FetchFinding, Plan]:
    plan = Source(write_config(folder, [{"name": "m", **keys}])).plan(())
    [found] = look_up(plan, 60.0)
    return found, with_estimates(plan, [found])


@pytest.mark.usefixtures("whole_hub")
def test_a_file_is_estimated_from_the_hub_as_on_the_disk(tmp_path: Path) -> None:
    keys = {"engine": "llamacpp", "path": "test/tiny:Q8_0"}
    found, plan = estimated(tmp_path, **keys)
    model, place = plan.config.models[0], plan.places[0]
    assert found.level == "ok"
    assert found.estimate == estimate(model, place, {}, tmp_path / "tiny-Q8_0.gguf")
    assert plan.estimates["m"].kv_1k_bytes > 0


def test_a_folder_is_estimated_without_its_weights(tmp_path: Path, whole_hub: list[str]) -> None:
    found, _ = estimated(tmp_path, engine="transformers", path="test/tiny", revision="llama")
    assert found.estimate is not None
    assert found.estimate.weights_bytes == 4 * 32 * 2**20  # float32 on a CPU
    assert found.estimate.context == 131072
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    assert not any("tokenizer" in path for path in whole_hub)


def test_a_model_of_ctranslate2_is_estimated_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", a=2**20)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with hub_server({"a" * 40: files}, {"main": "a" * 40}) as (url, _):
        monkeypatch.setenv("HF_ENDPOINT", url)
        found, _ = estimated(tmp_path, engine="faster_whisper", path="test/tiny")
        other, _ = estimated(tmp_path, engine="transformers", path="test/tiny")
    assert found.level == "ok" and found.estimate is not None
    assert found.estimate.weights_bytes == len(files["model.bin"])
    assert other.level == "error" and "`engine: faster_whisper` loads it" in other.said


@pytest.mark.usefixtures("whole_hub")
def test_weights_that_do_not_fit_are_an_error_before_they_are_fetched(tmp_path: Path) -> None:
    keys = {"engine": "transformers", "path": "test/tiny", "revision": "llama"}
    found, _ = estimated(tmp_path, **keys, memory="100MiB")
    assert found.level == "error"
    assert "its weights alone take 128 MiB of this machine's memory" in found.said
    assert "What would fit: `options: {quantization: int8}` at least halves" in found.said


@pytest.mark.usefixtures("whole_hub")
def test_up_stops_before_it_fetches_what_cannot_fit(tmp_path: Path) -> None:
    model = {"name": "m", "engine": "transformers", "path": "test/tiny", "revision": "llama"}
    config = write_config(tmp_path, [{**model, "memory": "100MiB"}])
    command = [sys.executable, "-m", "servekit", "up", str(config), "--port", "0"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "28 MiB too few" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "hf").exists()


def test_the_header_of_a_file_may_be_longer_than_the_first_part(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    asked: list[int] = []

    def fetch(length: int) -> bytes:
        asked.append(length)
        return whole[:length]

    written = tmp_path / "written.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(remote_headers._FIRST_BYTES, "gguf", 100)
        remote_headers.write_header(written, len(whole), fetch)
    assert asked[:2] == [100, 400]
    assert asked[-1] < len(whole)
    assert gguf.read_gguf(written) == gguf.read_gguf(tmp_path / "whole.gguf")


def test_a_hub_that_is_not_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    [found] = told(tmp_path, "test/tiny:Q4_0")
    assert (found.level, "cannot be reached for test/tiny" in found.said) == ("warning", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [found] = told(tmp_path, "test/tiny:Q4_0")
    assert (found.level, "HF_HUB_OFFLINE is set" in found.said) == ("warning", True)
