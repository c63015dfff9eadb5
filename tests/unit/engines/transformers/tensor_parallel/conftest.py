"""A replica of two ranks on the CPU. Its rank 0 is the process that tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from servekit.protocol.messages import WorkerSpec
from tests.unit.engines.harness import Harness, make_spec, write_tiny_llama
from tests.unit.engines.seeing_model import SEEING, write_qwen2_5_omni, write_qwen2_audio
from tests.unit.engines.transformers.vision.pictures import Reference

ROOT = Path(__file__).parents[5]
MEDIA_WRITERS = SEEING | {"omni": write_qwen2_5_omni, "qwen2_audio": write_qwen2_audio}


@pytest.fixture(scope="session")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary that two can share evenly, which transformers 5.17 insists on."""
    return write_tiny_llama(tmp_path_factory.mktemp("even"), spare_tokens=1)


@pytest.fixture(scope="module")
def alone(even: Path) -> Iterator[Harness]:
    """The same on one device."""
    engine = Harness(make_spec(even))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def two_ranks() -> Callable[..., Any]:
    """Opens an engine over two ranks, one at a time: a process has one group."""

    @contextmanager
    def opened(
        path: Path, kind: Callable[[WorkerSpec], Harness] = Harness, **fields: Any
    ) -> Iterator[Harness]:
        patch = pytest.MonkeyPatch()
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # ranks are fresh interpreters
        try:
            engine = kind(make_spec(path, gpus=2, parallel="tensor", **fields))
            try:
                yield engine
            finally:
                engine.close()
        finally:
            patch.undo()

    return opened


@pytest.fixture(scope="module")
def media_model(tmp_path_factory: pytest.TempPathFactory, even: Path) -> Callable[[str], Path]:
    return cache(lambda name: MEDIA_WRITERS[name](tmp_path_factory.mktemp(name), even))


@pytest.fixture(scope="module")
def references(media_model: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(media_model(name)))
