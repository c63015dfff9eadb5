"""Adapters of every kind for the tiny model, and engines that serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engines.harness import PROMPTS, Harness, make_spec, reference
from tests.unit.engines.transformers.lora import making

Answers = Callable[[str], list[list[int]]]


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each of `making.configs`, by its name."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: making.write(tiny_model, root / name, config, seed)
        for seed, (name, config) in enumerate(making.configs().items())
    }


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


@pytest.fixture(scope="module")
def served(tiny_model: Path, adapters: dict[str, Path]) -> Iterator[Harness]:
    """One engine with all adapters, from the worker's specification."""
    specs = tuple(making.spec(folder) for folder in adapters.values())
    engine = Harness(make_spec(tiny_model, adapters=specs))
    yield engine
    engine.close()


@pytest.fixture
def bare(harness: Callable[..., Harness], request: Any) -> Harness:
    """A fresh engine without adapters, batching as the test's parameter says."""
    return harness(options={"batching": getattr(request, "param", "continuous")})
