"""llama.cpp from a folder of its own libraries: what is found there, what is refused, and why."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from servekit.engines.llamacpp.library import bindings, library_folder, struct_layouts
from servekit.engines.llamacpp.library.bindings import context_fields, open_binding
from servekit.engines.llamacpp.library.library_folder import Build
from servekit.engines.llamacpp.library.struct_layouts import CONTEXT_LAYOUTS, Layout
from servekit.errors import LoadError
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import PROMPTS

CC = shutil.which("cc")


def refusal(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        Build(path)
    assert caught.value.permanent
    return str(caught.value)


needs_cc = pytest.mark.skipif(CC is None, reason="no C compiler")


def compile_library(path: Path, *needs: Path) -> Path:
    """An empty library that needs others, which nobody tells the loader where to find.

    With a version in its name it goes by that name, else by its path: all are in one process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [str(CC), "-shared", "-x", "c", "/dev/null", "-x", "none", "-Wl,--no-as-needed"]
    command += [f"-Wl,-rpath-link,{one.parent}" for one in needs]
    command += [f"-Wl,-soname,{path.name}"] if ".so." in path.name else []
    subprocess.run([*command, "-o", str(path), *map(str, needs)], check=True)
    return path


def test_it_says_what_the_package_says_with_the_same_library(
    llama_build: Path, gguf_file: Path
) -> None:
    options = ({"library": str(llama_build)}, {"binding": "xllamacpp"})
    engines = [llamacpp(gguf_file, one) for one in options]
    try:
        ours, theirs = ([e.generate(p, max_tokens=20) for p in PROMPTS] for e in engines)
        assert ours == theirs
        assert engines[0].info.detail.startswith("llama.cpp 0.")
        assert engines[0].info.kv_cache_bytes == engines[1].info.kv_cache_bytes
    finally:
        for engine in engines:
            engine.close()


def test_the_file_itself_will_do(llama_build: Path) -> None:
    assert library_folder._find_library(llama_build / "libllama.so") == llama_build / "libllama.so"


@pytest.mark.parametrize("name", ["libllama.so.0", "libllama.so.0.5.0", "libllama.cuda.v0.5.0.so"])
def test_a_library_whose_name_tells_more(tmp_path: Path, name: str) -> None:
    for one in (name, "libllama-common.so", "libllama.a"):
        (tmp_path / one).touch()
    assert library_folder._find_library(tmp_path) == tmp_path / name


def test_a_folder_without_it(tmp_path: Path) -> None:
    (tmp_path / "libllama-common.so").touch()
    assert refusal(tmp_path) == f"options.library: there is no libllama.so in {tmp_path}."


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_text("this is no library")
    assert "libllama.so cannot be loaded" in refusal(tmp_path)


@needs_cc
def test_a_library_of_something_else(tmp_path: Path) -> None:
    compile_library(tmp_path / "libllama.so")
    assert re.search(r"has no \w+; this version of it is not known", refusal(tmp_path))


# ---------------------------------------------------------------- layouts


def test_a_layout_that_is_not_known_is_refused(
    llama_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Layout = tuple(field for field in CONTEXT_LAYOUTS[-1] if field[0] != "n_ubatch")
    monkeypatch.setattr(struct_layouts, "CONTEXT_LAYOUTS", (other,))
    said = refusal(llama_build)
    assert "in a way that servekit does not know" in said
    assert "llama.cpp 0.5 and 0.6" in said


@pytest.mark.parametrize(
    "moved", [{"kv_unified": False}, {"n_threads": 3}, {"n_seq_max": 2}, {"n_batch": 32}]
)
def test_a_context_that_is_not_what_was_asked_for_is_refused(
    llama_build: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch, moved: dict[str, int]
) -> None:
    """As where a field of the same default has moved, which the defaults do not show."""
    monkeypatch.setattr(
        bindings, "context_fields", lambda settings: context_fields(settings) | moved
    )
    with pytest.raises(LoadError, match="in a way that servekit does not know"):
        llamacpp(gguf_file, {"library": str(llama_build)})


# ---------------------------------------------------------------- GPUs


def test_a_build_for_cpus_says_that_it_is_one(llama_build: Path, gguf_file: Path) -> None:
    if open_binding("auto").library.call("llama_supports_gpu_offload"):
        pytest.skip("this build is for GPUs")
    with pytest.raises(LoadError, match=r"has no libggml-cuda\.so.*Or say `device: cpu`"):
        llamacpp(gguf_file, {"library": str(llama_build)}, device="cuda")


@needs_cc
def test_what_cuda_needs_is_found_in_pips_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    deep = compile_library(packages / "nvidia" / "two" / "lib" / "libservekit_b.so.13")
    near = compile_library(packages / "nvidia" / "one" / "lib" / "libservekit_a.so.13", deep)
    backend = compile_library(tmp_path / "libggml-cuda.so", near)
    assert "libservekit_a.so.13: cannot open" in library_folder._open_cuda(backend)
    monkeypatch.syspath_prepend(str(packages))
    assert library_folder._open_cuda(backend) == ""
    maps = Path("/proc/self/maps").read_text()
    assert all(str(one) in maps for one in (deep, near, backend))


@needs_cc
def test_a_cuda_build_without_its_libraries_says_which_and_where_from(
    tmp_path: Path, llama_build: Path, gguf_file: Path
) -> None:
    folder = tmp_path / "build"
    shutil.copytree(llama_build, folder)
    gone = compile_library(tmp_path / "libservekit_gone.so.13")
    compile_library(folder / "libggml-cuda.so", gone)
    gone.unlink()
    with pytest.raises(LoadError) as caught:
        llamacpp(gguf_file, {"library": str(folder)}, device="cuda")
    said = str(caught.value)
    assert "libggml-cuda.so cannot be loaded: libservekit_gone.so.13: cannot open" in said
    assert "nvidia-cublas" in said and said.endswith("Or say `device: cpu`.")


@needs_cc
def test_a_build_that_cuda_is_linked_into_says_the_same(tmp_path: Path) -> None:
    gone = compile_library(tmp_path / "libservekit_gone.so.13")
    backend = compile_library(tmp_path / "build" / "libggml-cuda.so", gone)
    compile_library(tmp_path / "build" / "libllama.so", backend)
    gone.unlink()
    assert "nvidia-cublas" in refusal(tmp_path / "build")


@needs_cc
def test_a_machine_without_the_driver_says_so(tmp_path: Path) -> None:
    gone = compile_library(tmp_path / "libcuda.so.999")
    backend = compile_library(tmp_path / "libggml-cuda.so", gone)
    gone.unlink()
    assert library_folder._open_cuda(backend).endswith("NVIDIA's driver, which is not installed.")
