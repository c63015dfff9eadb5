"""Pinning, memory and the known failures, on real GPUs. The table: `python -m tests.gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu import checks
from tests.integration.instance import Instance
from tests.unit.engines.harness import write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(checks.gpu_count() == 0, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("gpu")
    path = write_tiny_llama(folder / "model")
    entry = checks.model(str(path), "cuda", checks.gpu_count())
    with checks.serving(folder, entry) as instance:
        yield instance


@pytest.mark.parametrize(
    "check", [checks.pins, checks.memory, checks.known_failures, checks.released]
)
def test_on_gpus(instance: Instance, check: object) -> None:
    assert callable(check)
    for row in check(instance):
        assert row.ok is not False, row
