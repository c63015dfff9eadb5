"""Adapters of every kind for the tiny model, and engines that serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engines.harness import PROMPTS, Harness, make_spec, reference
from tests.unit.engines.transformers.lora import making

Answers = Callable[[str], list[list[int]]]


class Folders(dict[str, Path]):
    """A folder for each of `making.configs`, by its name; written when it is first asked for."""

    def __init__(self, model: Path, root: Path) -> None:
        super().__init__()
        self._model, self._root, self._configs = model, root, making.configs()

    def __missing__(self, name: str) -> Path:
        seed = list(self._configs).index(name)
        self[name] = making.write(self._model, self._root / name, self._configs[name], seed)
        return self[name]


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tiny_model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def answers(tiny_model: Path, adapters: dict[str, Path]) -> Answers:
    """What PEFT says to PROMPTS with an adapter, or the library without; worked out once."""
    known: dict[str, list[list[int]]] = {}

    def of(name: str) -> list[list[int]]:
        if name not in known:
            known[name] = (
                making.reference(tiny_model, adapters[name], PROMPTS)
                if name
                else reference(tiny_model, PROMPTS, making.COUNT)
            )
        return known[name]

    return of


ALL_IN_LANE = [
    pytest.param(making.FEW, id="few"),
    pytest.param(tuple(making.MODES), id="all", marks=pytest.mark.lane("adapters")),
]


@pytest.fixture(scope="module", params=ALL_IN_LANE)
def served(
    tiny_model: Path, adapters: dict[str, Path], request: pytest.FixtureRequest
) -> Iterator[Harness]:
    """One engine with adapters from the worker's specification."""
    specs = tuple(making.spec(adapters[name]) for name in request.param)
    engine = Harness(make_spec(tiny_model, adapters=specs))
    yield engine
    engine.close()


@pytest.fixture
def bare(harness: Callable[..., Harness], request: Any) -> Harness:
    """A fresh engine without adapters, batching as the test's parameter says."""
    return harness(options={"batching": getattr(request, "param", "continuous")})
