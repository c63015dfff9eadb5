"""Whose namespace it is."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from servekit.ray.process.namespace_lock import Job, NamespaceOwner, find_holder


def tenant(turn: int = 0, pid: int = 1) -> NamespaceOwner:
    return NamespaceOwner(turn, "here", pid, 0.0, "/run/a")


def job(number: int, namespace: str = "n", *, by: NamespaceOwner | None = None) -> Job:
    note = (by or tenant(pid=number)).job_config.metadata
    return Job(number, namespace, note)


def test_who_came_first_holds_it() -> None:
    jobs = [job(3), job(2), job(5)]
    assert find_holder(jobs, "n", 2) is None
    assert find_holder(jobs, "n", 3) == tenant(2, pid=2)
    assert find_holder(jobs, "n", 5) == tenant(2, pid=2)


def test_another_namespace_is_another_matter() -> None:
    assert find_holder([job(1, "other"), job(2)], "n", 2) is None


def test_a_program_of_somebody_else_holds_nothing() -> None:
    others = [Job(1, "n", {}), Job(2, "n", {"servekit": "?"}), Job(3, "n", {"servekit": '{"a":1}'})]
    assert find_holder(others, "n", 9) is None


def test_who_connects_anew_keeps_its_turn() -> None:
    again = job(7, by=tenant(1))
    later = job(4)
    assert find_holder([again, later], "n", 4) == tenant(1)  # though its job is a younger one
    assert find_holder([again, later], "n", 1) is None


def test_it_is_said_who_it_is() -> None:
    assert str(tenant(1, 42)).startswith("on here, pid 42, run directory /run/a, since 19")
