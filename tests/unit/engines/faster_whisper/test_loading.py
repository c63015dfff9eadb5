"""Models that CTranslate2 loads, and those that it does not: each with a sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.engines import create_engine
from servekit.errors import LoadError, RequestError
from tests.unit.engines.contract.subjects import spec
from tests.unit.engines.faster_whisper.conftest import open_hearer
from tests.unit.engines.hearing_model import Hearer, write_whisper


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def refuse(path: Path | str, **fields: object) -> str:
    with pytest.raises(LoadError) as refused:
        create_engine(spec("faster_whisper", path, **fields)).load(lambda _: None)
    return refused.value.message


def test_it_says_what_it_is(hearer: Hearer, folder: Path) -> None:
    info = hearer.info
    assert (info.architecture, info.dtype, info.device) == ("WhisperSpec", "float32", "cpu")
    assert info.serves == ("transcribe", "tokenize", "detokenize") and info.slots == 8
    assert info.weights_bytes < (folder / "model.bin").stat().st_size < info.weights_bytes + 10_000
    assert not info.sleeps, "a CPU has no memory of a GPU to free"
    ids = hearer.engine.codec.encode_plain("The lazy dog.")
    decoder = hearer.engine.codec.decoder()
    assert decoder.push(ids[:1]) + decoder.push(ids[1:]) + decoder.flush() == "The lazy dog."
    with pytest.raises(RequestError, match="no chat template"):
        hearer.engine.codec.render_chat([])


@pytest.mark.parametrize(
    ("dtype", "asked", "due"),
    [
        ("auto", "auto", "float32"),
        ("float32", "auto", "float32"),
        ("float32", "int8", "int8_float32"),
    ],
)
def test_compute_types(folder: Path, dtype: str, asked: str, due: str) -> None:
    engine = create_engine(
        spec("faster_whisper", folder, dtype=dtype, options={"compute_type": asked, "threads": 1})
    )
    assert engine.load(lambda _: None).dtype == due


def test_a_compute_type_that_a_cpu_lacks(folder: Path) -> None:
    assert "compute_type float16 is not for this cpu; it has" in refuse(folder, dtype="float16")


def test_a_model_for_transformers_is_to_be_converted(tmp_path: Path) -> None:
    said = refuse(write_whisper(tmp_path / "whisper"))
    assert f"ct2-transformers-converter --model {tmp_path}/whisper --output_dir" in said
    assert "or use engine transformers" in said


def test_another_folder(tmp_path: Path) -> None:
    assert "is no Whisper model of CTranslate2: it has no model.bin" in refuse(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_file_that_is_missing(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert f"has no {name}; convert the model with" in refuse(copy)


def test_a_model_that_is_cut_short(copy: Path) -> None:
    content = (copy / "model.bin").read_bytes()
    for size in (len(content) // 2, 100, 40):
        (copy / "model.bin").write_bytes(content[:size])
        assert "model.bin is damaged: it" in refuse(copy)


def test_a_damaged_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in refuse(copy)


def test_a_damaged_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert "CTranslate2 cannot load" in refuse(copy)


def test_features_of_another_model(copy: Path) -> None:
    file = copy / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"feature_size": 128}))
    assert "hears 80 mel bins, and preprocessor_config.json says 128" in refuse(copy)


def test_a_tokenizer_of_another_model(copy: Path) -> None:
    """CTranslate2 reads outside its table for a token that it has not."""
    file = copy / "tokenizer.json"
    known = json.loads(file.read_text())
    last = max(one["id"] for one in known["added_tokens"])
    more = [known["added_tokens"][-1] | {"id": last + 1, "content": "<|more|>"}]
    file.write_text(json.dumps(known | {"added_tokens": known["added_tokens"] + more}))
    assert "tokenizer.json has" in refuse(copy)
    kept = [one for one in known["added_tokens"] if one["content"] != "<|startofprev|>"]
    file.write_text(json.dumps(known | {"added_tokens": kept}))
    assert "is no Whisper's: it has no <|startofprev|>" in refuse(copy)


def test_only_what_its_own_environment_has_is_imported() -> None:
    """See `EngineKind.needs`."""
    absent = ("torch", "transformers", "onnxruntime", "llguidance", "gguf", "jinja2")
    code = (
        "import sys; from servekit.engines.faster_whisper import engine;"
        f"print([name for name in {absent} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_weights_can_be_put_aside(folder: Path) -> None:
    """On a GPU they sleep; the calls are the same here."""
    hearer = open_hearer(folder)
    from tests.unit.engines.faster_whisper.test_transcription import LONG

    before = hearer.text(hearer.hear(LONG))
    hearer.engine.sleep()
    hearer.engine.wake()
    assert hearer.text(hearer.hear(LONG)) == before
    hearer.engine.close()
