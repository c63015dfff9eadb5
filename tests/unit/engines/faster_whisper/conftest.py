"""A random model of CTranslate2, and the engine and the library with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.engines.faster_whisper.engine import FasterWhisperEngine
from tests.unit.engines.contract.subjects import spec
from tests.unit.engines.ctranslate2_model import PlainFasterWhisper, write_ctranslate2
from tests.unit.engines.hearing_model import Hearer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ctranslate2(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="session")
def plain(folder: Path) -> PlainFasterWhisper:
    return PlainFasterWhisper(folder)


def open_hearer(folder: Path, **options: object) -> Hearer:
    made = spec(
        "faster_whisper", folder, options={"threads": 1, "no_speech_threshold": None} | options
    )
    return Hearer(made, FasterWhisperEngine)


@pytest.fixture(scope="module")
def hearer(folder: Path) -> Iterator[Hearer]:
    hearer = open_hearer(folder)
    yield hearer
    hearer.engine.close()
