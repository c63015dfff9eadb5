"""Every engine that is installed, each with a small model of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servekit.config.engines import plugins
from tests.unit.engines.contract.running import Running
from tests.unit.engines.contract.subjects import SUBJECTS, Subject

#: The others are in the ordinary run, and "transformers" stands for both of its kinds of batching.
LANES = {"transformers-static": "long", "vllm": "vllm", "vllm-cpu": "vllm"}


def in_lane(subject: Subject) -> Any:
    lane = LANES.get(subject.name)
    marks = [] if lane is None else [pytest.mark.lane(lane)]
    return pytest.param(subject, id=subject.name, marks=marks)


@pytest.fixture(scope="module", params=map(in_lane, SUBJECTS))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    chosen: Subject = request.param
    if chosen.site is not None:
        site = str(chosen.site(tmp_path_factory.mktemp("site")))
        sys.path.insert(0, site)
        plugins.look_again()

        def remove() -> None:
            sys.path.remove(site)
            plugins.look_again()

        request.addfinalizer(remove)
    if chosen.missing:
        pytest.skip(chosen.missing)
    return chosen


@pytest.fixture(scope="module")
def model(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def shared(subject: Subject, model: Path) -> Iterator[Running]:
    running = Running(subject.spec(model), exact=subject.exact)
    yield running
    running.close()


@pytest.fixture
def engine(shared: Running, subject: Subject, request: pytest.FixtureRequest) -> Iterator[Running]:
    """The engine, which every test leaves alive, idle, and silent about jobs that had ended."""
    if reason := subject.exempt.get(request.node.originalname):
        pytest.skip(reason)
    yield shared
    assert shared.engine.fatal is None
    assert shared.late == []
