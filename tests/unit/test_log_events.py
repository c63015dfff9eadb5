"""The catalogue of log events holds the events of the source, and no others."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from servekit.log_events import EVENTS, sentence

PACKAGE = Path(__file__).parents[2] / "servekit"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
#: Calls of a logger whose event is a variable, by function; and the constants they may have.
RELAYS = {"on_line"}  # a child's line
VARIABLES = {
    "report_stray": {"gpu_memory_over_claim", "gpu_memory_stray"},
    "report_death": {"process_exited", "process_start_failed"},
}
#: Events whose names are not in a call of a logger.
RENDERED = {"output", "library_logged"}


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (f"{path.relative_to(PACKAGE)}", node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(place, function, call) of all calls of loggers."""
    return [
        (f"{path}:{node.lineno}", function.name, node)
        for path, function in functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and _is_of_logger(node.func)
    ]


def _is_of_logger(called: ast.expr) -> bool:
    if isinstance(called, ast.Call):  # getattr(log, level)(…)
        return ast.unparse(called).startswith("getattr(log,")
    if not isinstance(called, ast.Attribute) or called.attr not in LEVELS | {"log"}:
        return False
    return ast.unparse(called.value) in ("log", "self._log")


def events_of(function: str, call: ast.Call) -> set[str] | None:
    """Return the events of a call; None if it is not a constant, and not known."""
    event = call.args[1 if ast.unparse(call.func).endswith(".log") else 0]
    if isinstance(event, ast.Constant) and isinstance(event.value, str):
        return {event.value}
    return VARIABLES.get(function, set() if function in RELAYS else None)


def test_every_event_of_the_source_is_in_the_catalogue_and_the_other_way_round() -> None:
    used = set(RENDERED)
    for place, function, call in calls():
        events = events_of(function, call)
        assert events is not None, f"{place}: the event is not a constant"
        assert events <= EVENTS.keys(), f"{place}: not in the catalogue: {events - EVENTS.keys()}"
        used |= events
    assert used == EVENTS.keys(), f"nothing logs these: {EVENTS.keys() - used}"


def test_events_that_reach_a_logger_in_a_variable_are_constants_elsewhere() -> None:
    constants = {
        node.value
        for _, function in functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Constant)
    }
    assert set().union(*VARIABLES.values()) <= constants


def test_every_sentence_has_its_fields() -> None:
    for place, function, call in calls():
        fields = {keyword.arg for keyword in call.keywords}
        for event in events_of(function, call) or ():
            without_optional = re.sub(r"\[.*?\]", "", EVENTS[event])
            missing = set(re.findall(r"\{(\w+)\}", without_optional)) - fields
            assert not missing, f"{place}: {event} has no {missing}"
        assert len(call.args) <= 2 - (not ast.unparse(call.func).endswith(".log")), place


def test_names_of_events_and_fields_are_snake_case() -> None:
    names = {*EVENTS, *(k.arg for _, _, call in calls() for k in call.keywords if k.arg)}
    assert not [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]


def test_all_loggers_are_structlog_s() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        assert "log = logging.getLogger" not in path.read_text(), path


@pytest.mark.parametrize(
    ("event", "fields", "expected"),
    [
        ("output", {"text": "as {it} [is]"}, "as {it} [is]"),
        ("model_loading", {"model": "{reason}"}, "Loading {reason}"),
        ("worker_ready", {"device": "cpu", "after_s": 1.0}, "The worker serves on cpu after 1 s"),
        ("worker_ready", {}, "The worker serves on ? after ? s"),
        ("supervisor_stopped", {"x": 0, "y": None, "z": [], "u": ""}, "Stopped x=0"),
        ("unknown_parameters_ignored", {"names": ["a", "b"]}, "…: a, b"),
        (
            "process_exited",
            {"reason": "killed", "again_in_s": 0.504},
            "The process ended and is started again in 0.5 s: killed",
        ),
        (
            "process_exited",
            {"reason": "killed", "again_in_s": None},
            "The process ended and is not started again: killed",
        ),
        ("of a plugin {x} [y]", {"n": 1}, "of a plugin {x} [y] n=1"),
    ],
)
def test_a_sentence_has_the_values_of_its_fields(
    event: str, fields: dict[str, object], expected: str
) -> None:
    said = sentence(event, fields)
    assert said.endswith(expected[1:]) if expected.startswith("…") else said == expected
