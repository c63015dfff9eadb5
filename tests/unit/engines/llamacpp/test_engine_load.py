"""Loading by the llama.cpp engine: what it says of a model, and of what it cannot load."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from servekit.engines.llamacpp.engine import LlamaCppEngine
from servekit.engines.llamacpp.library import bindings
from servekit.errors import LoadError
from servekit.protocol.messages import Progress
from servekit.system import cgroup
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import Harness, make_spec
from tests.unit.engines.origins import write_tiny_gguf

Make = Callable[..., Harness]


def refusal(path: Path | str, **fields: object) -> LoadError:
    with pytest.raises(LoadError) as caught:
        LlamaCppEngine(make_spec(path, engine="llamacpp", **fields)).load(lambda progress: None)
    return caught.value


def test_what_is_said_of_a_model(gguf_engine: Harness, binding: str) -> None:
    info = gguf_engine.info
    assert (info.max_context, info.slots, info.chat) == (256, 8, True)
    assert (info.architecture, info.dtype, info.device) == ("llama", "F32", "cpu")
    assert info.resumes
    assert info.parameters == 78_464
    # Keys and values of 2 heads of 16 in 2 layers, float32, for 8 slots of 512 tokens.
    assert info.kv_cache_bytes == 2 * 2 * 16 * 2 * 4 * 4096
    assert info.detail.startswith(f"{binding} ")
    assert {"generate", "grammar", "logprobs", "penalties", "min_p"} <= set(info.serves)
    assert not {"embed", "adapters", "tools"} & set(info.serves)


def test_the_quantization_is_named_as_files_are(gguf: Make, gguf_engine: Harness) -> None:
    assert gguf(general__file_type=15).info.dtype == "Q4_K_M"
    info = gguf_engine.info
    assert info.weights_bytes == 4 * info.parameters
    assert (info.prefix_block, info.prefix_tokens) == (1, 4096)


def test_progress_counts_up(gguf_engine: Harness) -> None:
    load = [one for one in gguf_engine.progress if one.phase == "load"]
    assert load[0] == Progress("load", 0, 100, "steps")
    assert load[-1] == Progress("load", 100, 100, "steps")
    assert [one.done for one in load] == sorted(one.done for one in load)


def test_a_shorter_context(gguf: Make) -> None:
    assert gguf(max_context=100).info.max_context == 100
    assert gguf(max_context=10_000).info.max_context == 256  # the model's own


# ---------------------------------------------------------------- files


def test_a_folder_with_one_gguf_is_that_file(gguf_file: Path) -> None:
    engine = LlamaCppEngine(make_spec(gguf_file.parent, engine="llamacpp"))
    assert engine.load(lambda progress: None).max_context == 256
    engine.close()


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    error = refusal(tmp_path)
    assert error.permanent
    assert "no .gguf file" in str(error)
    assert "engine transformers" in str(error)


def test_an_architecture_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    error = refusal(write_tiny_gguf(tmp_path / "odd.gguf", architecture="oddformer"))
    assert error.permanent
    assert "unknown model architecture: 'oddformer'" in str(error)


def test_a_file_without_all_its_tensors(tmp_path: Path) -> None:
    error = refusal(write_tiny_gguf(tmp_path / "less.gguf", skip="ffn_up"))
    assert error.permanent
    assert "ffn_up" in str(error)


def test_a_file_cut_short(tmp_path: Path, gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    error = refusal(tmp_path / "cut.gguf")
    assert error.permanent
    assert "not a whole GGUF file" in str(error)


def test_no_gguf_at_all(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is not a model, but some text")
    assert "does not start with GGUF" in str(refusal(tmp_path / "text.gguf"))
    assert "no such file" in str(refusal(tmp_path / "none.gguf"))
    assert "ORG/NAME/FILE.gguf" in str(refusal("org/name"))


def test_a_part_without_the_others(tmp_path: Path) -> None:
    first = write_tiny_gguf(tmp_path / "m-00001-of-00002.gguf", split=2)
    assert "m-00002-of-00002.gguf is missing" in str(refusal(first))
    second = first.rename(tmp_path / "m-00002-of-00002.gguf")
    assert "name the first" in str(refusal(second))


# ---------------------------------------------------------------- memory and machine


def test_a_context_that_is_too_big(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: 256 * 1024)
    error = refusal(gguf_file, max_context=256, options={"cache_type": "f32"})
    assert error.permanent
    assert "A context of 256 tokens takes" in str(error)
    assert "Lower max_context" in str(error)


def test_a_context_that_nobody_asked_for_is_what_fits(
    gguf: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: 256 * 1024)
    assert gguf().info.max_context == 204  # 0.4 of the memory, at 512 bytes a token


def test_a_gpu_needs_a_build_for_it(gguf_file: Path) -> None:
    if bindings.open_binding("auto").library.call("llama_supports_gpu_offload"):
        pytest.skip("this build is for GPUs")
    error = refusal(gguf_file, device="cuda")
    assert error.permanent
    assert "without CUDA" in str(error)


def test_a_missing_package_names_the_command(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "_opened", {})
    monkeypatch.setattr(bindings, "MODULES", dict.fromkeys(bindings.MODULES, "no_such_package"))
    error = refusal(gguf_file)
    assert error.permanent
    assert "pip install 'servekit[llamacpp]'" in str(error)
    assert "pip install llama-cpp-python" in str(
        refusal(gguf_file, options={"binding": "llama-cpp-python"})
    )


# ---------------------------------------------------------------- versions of xllamacpp


def test_a_layout_that_is_not_known_is_refused() -> None:
    known = bindings.open_binding("xllamacpp")
    assert isinstance(known, bindings.XLlamaCpp)
    params = known._module.CommonParams()
    with pytest.raises(LoadError, match="does not know"):
        known._check_layout(params, bindings._address_of(params) + 4)


def test_a_version_without_the_conversion_is_read_by_its_structs(
    llama_build: Path, gguf_file: Path, gguf_engine: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "_CONVERTERS", ("_Z3to_model", "_Z5to_context"))
    file = llama_build / "libllama.so"  # a copy of its library, which has a log of its own
    module = SimpleNamespace(xllamacpp=SimpleNamespace(__file__=str(file)))
    opened = bindings._open_xllamacpp(module)
    assert isinstance(opened, bindings.StructBinding)
    monkeypatch.setitem(bindings._opened, "xllamacpp", opened)
    other = llamacpp(gguf_file, {"binding": "xllamacpp"})
    try:
        said = other.generate("The quick brown fox", max_tokens=20, ignore_eos=True)
        expected = gguf_engine.generate("The quick brown fox", max_tokens=20, ignore_eos=True)
        assert said == expected
        assert other.info.kv_cache_bytes == gguf_engine.info.kv_cache_bytes
    finally:
        other.close()


@pytest.mark.parametrize("field", ["n_seq_max", "kv_unified", "type_k"])
def test_a_field_of_another_name_is_noticed(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    names = bindings._COMMON_NAMES | {field: "of_another_version"}
    monkeypatch.setattr(bindings, "_COMMON_NAMES", names)
    error = refusal(gguf_file, options={"binding": "xllamacpp"})
    assert error.permanent and "in a way that servekit does not know" in str(error)


def test_a_field_that_changes_nothing_may_be_missing(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = bindings._COMMON_NAMES | {"no_perf": "of_another_version"}
    monkeypatch.setattr(bindings, "_COMMON_NAMES", names)
    llamacpp(gguf_file, {"binding": "xllamacpp"}).close()


def test_neither_torch_nor_transformers_is_imported(gguf_file: Path) -> None:
    code = (
        "import sys, msgspec\n"
        "from servekit.engines import create_engine\n"
        "from servekit.protocol.messages import WorkerSpec\n"
        "engine = create_engine(msgspec.json.decode(sys.argv[1], type=WorkerSpec))\n"
        "info = engine.load(lambda progress: None)\n"
        "assert 'grammar' in info.serves\n"
        "print(*{name.split('.')[0] for name in sys.modules})\n"
        "engine.close()\n"
    )
    spec = msgspec.json.encode(make_spec(gguf_file, engine="llamacpp")).decode()
    run = subprocess.run(
        [sys.executable, "-c", code, spec],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr
    assert not {"torch", "transformers", "peft"} & set(run.stdout.split())
