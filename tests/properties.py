"""Hypothesis: the same examples in an ordinary run, others in each run of the lane `fuzz`.

The lane runs every property test, by a seed that it prints and keeps what has failed in
.hypothesis, to be tried first the next time. `--hypothesis-seed N` repeats a run, without what was
kept; `--hypothesis-profile default` looks for other examples in an ordinary run.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

FAILED = Path(__file__).parents[1] / ".hypothesis" / "examples"
#: Hypothesis's own profile for continuous integration: always the same examples, kept nowhere, and
#: no deadline for one of them on a busy machine.
FIXED = "ci"
RANDOM = "random"


def load_profile(config: pytest.Config, *, by_chance: bool) -> None:
    """Choose the examples of this run. Call it before test modules are imported."""
    settings.register_profile(
        RANDOM,
        settings.get_profile(FIXED),
        derandomize=False,
        database=DirectoryBasedExampleDatabase(FAILED),
        max_examples=300,  # of a test that does not say
    )
    settings.load_profile(RANDOM if by_chance else FIXED)
    if by_chance and config.getoption("hypothesis_seed") is None:
        # pytest-xdist hands the options of the first process to its workers: they have it already
        config.option.run_seed = getattr(config.option, "run_seed", random.getrandbits(32))


def describe_run(config: pytest.Config) -> list[str]:
    """Return the line for pytest's header; none in an ordinary run."""
    seed = getattr(config.option, "run_seed", None)
    return [] if seed is None else [f"examples by chance: --hypothesis-seed={seed} repeats them"]


def is_property(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj)


def seed_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have all property tests begin with the seed of this run.

    `--hypothesis-seed` and `@seed` would do so too, but they turn the kept examples off.
    """
    run_seed = getattr(config.option, "run_seed", None)
    if run_seed is not None:
        for item in filter(is_property, items):
            set_seed(item.obj, run_seed)  # type: ignore[attr-defined]


def set_seed(test: Any, seed: int) -> None:
    """Set the seed of a test function, or of a state machine's method."""
    machine = getattr(test, "_hypothesis_state_machine_class", None)
    seeded = machine or getattr(test, "__func__", test)
    seeded._hypothesis_internal_use_seed = seed
