"""When the load generator says that it was the limit itself."""

from __future__ import annotations

import pytest

from servekit.bench.client_saturation import Clients, saturation_limits


def told(**changes: object) -> list[str]:
    calm: dict[str, object] = {"cpu_cores": (0.3, 0.4), "lag_p99_s": 0.001, "late_p99_s": 0.001}
    return list(saturation_limits(Clients(**{**calm, **changes})))  # type: ignore[arg-type]


def test_a_calm_client_says_nothing() -> None:
    assert told() == []
    assert told(late_p99_s=None, machine=0.94, beside_server=True, cores=2) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpu_cores": (0.2, 0.97)}, "its busiest process took 97% of a core"),
        ({"lag_p99_s": 0.035}, "event loop was late: 1 % of the times by 35 ms"),
        ({"late_p99_s": 0.12}, "sent late, 1 % of them by 120 ms"),
        ({"machine": 0.99, "cores": 2, "beside_server": True}, "The 2 cores of this machine"),
    ],
)
def test_each_limit_is_one_sentence_with_its_figure(changes: dict[str, object], words: str) -> None:
    (sentence,) = told(**changes)
    assert words in sentence
    assert sentence.endswith(".")


def test_more_processes_are_the_advice_only_where_there_are_cores_for_them() -> None:
    assert "--processes 3" in told(cpu_cores=(0.95, 0.5), cores=4)[0]
    assert "more free cores" in told(cpu_cores=(0.95, 0.5), cores=2)[0]
    assert "more free cores" in told(cpu_cores=(0.95, 0.5), cores=4, machine=0.97)[0]


def test_a_busy_machine_is_no_matter_where_the_server_is_elsewhere() -> None:
    assert told(machine=1.0, cores=2) == []
