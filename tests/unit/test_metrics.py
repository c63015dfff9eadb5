"""The list of metrics, and what is built on it: the reference, the dashboard, the alarms."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from servekit import metrics
from servekit.gateway.api.admin.metrics import Page
from servekit.metrics import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "servekit.json"
RULES = DEPLOY / "prometheus" / "servekit.rules.yml"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Debian's package prometheus"
)


def test_names_and_labels_are_as_prometheus_has_them() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"(servekit|gen_ai)_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")


#: As the convention has them.
_OF_CONVENTION = {
    "gen_ai_server_time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
        *(7.5, 10.0),
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
    "gen_ai_server_request_duration_seconds": tuple(0.01 * 2**n for n in range(14)),
    "gen_ai_client_token_usage": (
        *(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216),
        67108864,
    ),
}


@pytest.mark.parametrize("name", sorted(_OF_CONVENTION))
def test_the_boundaries_of_the_convention_are_among_ours(name: str) -> None:
    assert set(_OF_CONVENTION[name]) <= set(metrics.BY_NAME[name].buckets)


def test_the_reference_has_a_row_for_each() -> None:
    rows = metrics.metrics_reference().splitlines()[2:]
    assert len(rows) == len(METRICS)
    for metric, row in zip(METRICS, rows, strict=True):
        assert row.startswith(f"| `{metric.name}` | {metric.kind} |")
        assert metric.help in row
        assert row.replace("\\|", "").count("|") == 5, "a bar in the help breaks the table"


# ---------------------------------------------------------------- dashboard and alarms


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of all that is asked of Prometheus."""
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
    for note in board["annotations"]["list"]:
        yield note["name"], note["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


_LABELS = {label for metric in METRICS for label in metric.labels}
_SERIES = {
    metric.name + end: metric
    for metric in METRICS
    for end in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
}


def asked(expression: str) -> set[str]:
    names = set(re.findall(r"\b(?:servekit|gen_ai)_\w+", expression))
    return names - _LABELS


@pytest.mark.parametrize(("where", "expression"), sorted(set(expressions())))
def test_all_that_is_asked_for_exists(where: str, expression: str) -> None:
    names = asked(expression)
    assert names or expression.startswith("up{")
    assert names <= set(_SERIES), where
    # each selector and grouping names labels that the metric has, or Prometheus' own
    for name, selector in re.findall(r"\b((?:servekit|gen_ai)_\w+){([^}]*)}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert labels <= {*_SERIES[name].labels, "instance", "job"}, where


def test_the_dashboard_shows_every_metric() -> None:
    shown = {_SERIES[name].name for _, one in expressions() for name in asked(one)}
    assert {metric.name for metric in METRICS} - shown == set()


def test_every_alarm_says_how_bad_it_is_and_what_is_wrong() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "warning", "info")
        assert rule["annotations"]["summary"]


def test_panels_do_not_lie_on_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


# ---------------------------------------------------------------- promtool


def promtool(*args: str, stdin: bytes = b"") -> str:
    run = subprocess.run(["promtool", *args], input=stdin, capture_output=True, timeout=60)
    said = (run.stdout + run.stderr).decode()
    assert run.returncode == 0, said
    return said


@needs_promtool
def test_promtool_finds_no_fault_with_configuration_and_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "config", str(CONFIG))


@needs_promtool
async def test_promtool_finds_no_fault_with_names_and_help() -> None:
    text, _ = await Page(()).text("")
    assert promtool("check", "metrics", stdin=text) == ""


@needs_promtool
def test_alarms_go_off_when_they_should_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(_CASES))
    promtool("test", "rules", str(tmp_path / "tests.yml"))


def _case(series: dict[str, str], minutes: int, *firing: str, quiet: tuple[str, ...] = ()) -> Any:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
                "eval_time": f"{minutes}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if name in firing else [],
            }
            for name in (*firing, *quiet)
        ],
    }


_M = 'instance="i",model="m"'
_W = f'{_M},worker="m/0"'
_CASES = {
    "rule_files": [str(RULES)],
    "evaluation_interval": "1m",
    "tests": [
        _case(
            {f"servekit_model_ready{{{_M}}}": "1 1 0x20"},
            *(10, "ServekitModelNotReady"),
            quiet=("ServekitBreakerOpen",),
        ),
        _case(
            {
                f"servekit_model_ready{{{_M}}}": "0x20",
                f'servekit_model_residency{{{_M},tier="stopped"}}': "1x20",
            },
            10,
            quiet=("ServekitModelNotReady",),
        ),
        _case(
            {f"servekit_worker_restarts_total{{{_W}}}": "0 0 1x20"},
            *(5, "ServekitWorkerDied"),
            quiet=("ServekitWorkersKeepDying",),
        ),
        _case(
            {
                f'servekit_requests_total{{{_M},status="500"}}': "0+6x20",
                f'servekit_requests_total{{{_M},status="200"}}': "0+60x20",
            },
            *(12, "ServekitErrors"),
        ),
        _case(
            {
                f'servekit_requests_total{{{_M},status="500"}}': "0+1x20",
                f'servekit_requests_total{{{_M},status="200"}}': "0+60x20",
            },
            12,
            quiet=("ServekitErrors",),
        ),
        _case(
            {
                f'servekit_worker_gpu_memory_stray_bytes{{{_W},gpu="1"}}': "0 0 5e8x9",
                f'servekit_worker_gpu_memory_bytes{{{_W},gpu="0"}}': "1.1e9x9",
                f'servekit_worker_gpu_memory_claimed_bytes{{{_W},gpu="0"}}': "1e9x9",
            },
            *(8, "ServekitStrayGpuMemory", "ServekitGpuMemoryBeyondClaim"),
        ),
        _case(
            {
                f"servekit_queue_depth{{{_M}}}": "90x9",
                f"servekit_queue_limit{{{_M}}}": "100x9",
                f'servekit_queue_wait_seconds_bucket{{{_M},le="10.0"}}': "0+1x9",
                f'servekit_queue_wait_seconds_bucket{{{_M},le="30.0"}}': "0+60x9",
                f'servekit_queue_wait_seconds_bucket{{{_M},le="+Inf"}}': "0+60x9",
            },
            *(9, "ServekitQueueFilling", "ServekitLongWaits"),
        ),
    ],
}
