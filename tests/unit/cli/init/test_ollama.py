"""Ollama's folder of models, as it is on disk, into a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from servekit.cli.init.brought_models import Carried
from servekit.cli.init.ollama import convert_models
from servekit.config.load import load_config
from servekit.config.schema import ModelConfig
from servekit.errors import ConfigError
from servekit.model_metadata.gguf import begins_as_gguf
from tests.unit.engines.origins import write_tiny_gguf

LIST = """NAME                              ID              SIZE      MODIFIED
qwen3:0.6b                        7df6b6e09427    522 MB    3 weeks ago
hf.co/bartowski/X-GGUF:Q4_K_M     0123456789ab    1.1 GB    2 hours ago
tiny:latest                       0123456789ab    1.1 GB    2 hours ago
gpt-oss:120b-cloud                0123456789ab    -         2 hours ago
nobody-knows:7b                   0123456789ab    4 GB      2 hours ago
"""
PARAMS = {"temperature": 0.2, "repeat_penalty": 1.1, "num_ctx": 128, "num_predict": -1}


class Store:
    """A folder as Ollama makes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True)

    def blob(self, data: bytes, name: str = "sha256-{}") -> str:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / name.format(digest)).write_bytes(data)
        return f"sha256:{digest}"

    def add(self, path: str, *, blob_name: str = "sha256-{}", **layers: bytes) -> None:
        told = [
            {
                "mediaType": f"application/vnd.ollama.image.{kind}",
                "digest": self.blob(data, blob_name),
            }
            for kind, data in layers.items()
        ]
        manifest = self.root / "manifests" / path
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": told}))


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    return write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()


@pytest.fixture
def store(tmp_path: Path, weights: bytes) -> Store:
    store = Store(tmp_path / "ollama" / "models")
    library = "registry.ollama.ai/library"
    params = json.dumps(PARAMS | {"stop": ["<end>"], "mirostat": 1}).encode()
    more: dict[str, Any] = {
        "template": b"{{ .Prompt }}",
        "license": b"MIT",
        "system": b"You are tiny.",
    }
    store.add(f"{library}/tiny/0.1b", model=weights, params=params, **more)
    store.add(f"{library}/tiny/latest", model=weights)
    store.add(f"{library}/twin/latest", model=weights, blob_name="sha256:{}")
    store.add("registry.ollama.ai/me/mine/v1", model=b"GGUF broken")
    store.add(f"{library}/gpt-oss/120b-cloud")
    store.add("hf.co/org/name-GGUF/Q8_0", model=weights, projector=b"GGUF", params=b'{"top_k": 4}')
    return store


def convert(folder: Path, *args: Any, **more: Any) -> tuple[dict[str, ModelConfig], Carried]:
    carried = convert_models(*args, **more)
    path = folder / "servekit.yaml"
    path.write_text(carried.text)
    return {model.name: model for model in load_config(path).models}, carried


def test_models_are_served_from_their_blobs(tmp_path: Path, store: Store) -> None:
    models, carried = convert(tmp_path, str(store.root.parent), {})
    assert list(models) == ["hf.co/org/name-GGUF:Q8_0", "tiny:0.1b", "tiny"]
    tiny = models["tiny:0.1b"]
    assert begins_as_gguf(Path(tiny.path)) and tiny.path.startswith(str(store.root))
    assert tiny.sampling.model_dump(exclude_none=True) == {
        "temperature": 0.2,
        "repetition_penalty": 1.1,
    }
    assert (tiny.engine, tiny.max_context) == ("auto", 128)
    assert (tiny.load, tiny.idle_unload_s) == ("on_demand", 300)
    # the same weights and parameters under several names are one model
    assert models["tiny"].aliases == ("tiny:latest", "twin", "twin:latest")
    said = "\n".join(carried.left_out)
    assert "tiny:0.1b: stop ('<end>'): " in said and "tiny:0.1b: mirostat: 1" in said
    assert "tiny:0.1b: its system prompt" in said and "num_predict" not in said
    assert "name-GGUF:Q8_0: its projector" in said
    assert (
        "me/mine:v1: the model: " in said and "is not a readable GGUF file: it ends early" in said
    )
    assert "gpt-oss:120b-cloud: the model: it runs in Ollama's cloud" in said


def test_a_list_names_models(tmp_path: Path, store: Store) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(LIST)
    environ = {"OLLAMA_MODELS": str(store.root)}
    for source, stdin in ((str(listed), None), ("-", LIST)):
        models, carried = convert(tmp_path, source, environ, stdin=stdin)
        assert models["qwen3:0.6b"].path == "Qwen/Qwen3-0.6B"
        assert models["hf.co/bartowski/X-GGUF:Q4_K_M"].path == "bartowski/X-GGUF:Q4_K_M"
        assert begins_as_gguf(Path(models["tiny"].path))
        assert len(models) == 3
        said = "\n".join(carried.left_out)
        assert "qwen3:0.6b: Ollama's weights, which are not here" in said
        assert "nobody-knows:7b: the model: its weights are not here" in said
    models, _ = convert(tmp_path, "-", {"HOME": str(tmp_path)}, stdin=LIST)
    assert list(models) == ["qwen3:0.6b", "hf.co/bartowski/X-GGUF:Q4_K_M"]


def test_the_folder_is_found(tmp_path: Path, weights: bytes) -> None:
    Store(tmp_path / ".ollama/models").add("registry.ollama.ai/library/a/b", model=weights)
    models, _ = convert(tmp_path, None, {"HOME": str(tmp_path)})
    assert list(models) == ["a:b"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "there are no models of Ollama in "),
        ("empty", "there are no models of Ollama in empty or empty/models; name its folder"),
        ("list", "this is no output of `ollama list`, which begins with NAME and ID"),
        ("cloud", "none of the models of cloud can be brought:\na:b-cloud: the model: it runs"),
    ],
)
def test_what_cannot_be_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "list").write_text("qwen3:0.6b\n")
    Store(tmp_path / "cloud").add("registry.ollama.ai/library/a/b-cloud")
    with pytest.raises(ConfigError) as caught:
        convert_models(source, {"HOME": str(tmp_path)})
    assert said in str(caught.value)
