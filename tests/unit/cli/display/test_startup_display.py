from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import msgspec
import pytest
import structlog
from msgspec.structs import replace
from rich.console import Console
from structlog.testing import capture_logs

from servekit import logging_config
from servekit.cli.display.startup_display import (
    BannerFacts,
    Display,
    banner,
    is_start_over,
    picture,
    read_line,
)
from servekit.cli.display.tables import format_size, progress_text, replica_note, status_tables
from servekit.protocol.adapters import AdapterInfo, AdapterStatus
from servekit.protocol.messages import (
    GatewayStatus,
    Link,
    ModelInfo,
    ModelStatus,
    Preset,
    Progress,
    Refused,
    ReplicaStatus,
    Status,
    WorkerState,
)
from servekit.protocol.types import as_builtins

WORDS = BannerFacts(ui=True, stop="servekit down")


def replica(name: str, state: WorkerState, **fields: object) -> ReplicaStatus:
    return ReplicaStatus(name, state, "", 7, "cpu", **fields)  # type: ignore[arg-type]


def status(
    *replicas: ReplicaStatus, gateway: str = "ready", draining: bool = False, in_flight: int = 0
) -> Status:
    info = ModelInfo(10, 1, True, "Llama", "float32", "cpu")
    return Status(
        version="1",
        pid=1,
        url="http://h:1",
        config="/c.yaml",
        started_at=0.0,
        rss_bytes=2**20,
        models=(ModelStatus("m", "echo", "p", 0, replicas, info),),
        gateways=(GatewayStatus("gateway/0", 2, gateway, in_flight=in_flight),),
        draining=draining,
    )


def shown(renderable: object) -> str:
    console = Console(width=200, file=io.StringIO(), markup=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def display() -> Iterator[Display]:
    console = Console(width=200, file=io.StringIO())
    yield Display(console, None, WORDS, quiet=False)


def printed(display: Display) -> str:
    file = display._console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize(
    ("states", "gateway", "expected"),
    [
        (["ready", "failed"], "ready", True),
        (["ready", "loading"], "ready", False),
        (["ready", "backoff"], "ready", False),
        (["ready"], "starting", False),
    ],
)
def test_a_start_is_over_when_all_serve_or_have_failed(
    states: list[WorkerState], gateway: str, expected: bool
) -> None:
    replicas = [replica(f"m/{i}", state) for i, state in enumerate(states)]
    assert is_start_over(status(*replicas, gateway=gateway)) is expected


def test_a_start_is_over_where_a_gateway_of_another_node_has_found_no_port() -> None:
    ours = status(replica("m/0", "ready"))
    other = GatewayStatus("gateway/n", 0, "starting", node="n")
    assert not is_start_over(replace(ours, gateways=(*ours.gateways, other)))
    other = GatewayStatus("gateway/n", 0, "backoff", node="n", reason="the port is taken")
    assert is_start_over(replace(ours, gateways=(*ours.gateways, other)))


def test_an_endpoint_that_is_down_does_not_hold_the_banner_back(display: Display) -> None:
    down = status(replica("m/0", "backoff", reason="it does not answer"))
    assert not is_start_over(down)
    [model] = down.models
    down = msgspec.structs.replace(down, models=(msgspec.structs.replace(model, engine="openai"),))
    display.on_change(down)
    assert "is up" in printed(display)
    assert "tried again: it does not answer" in printed(display)


def test_the_banner_comes_once(display: Display) -> None:
    display.on_change(status(replica("m/0", "loading")))
    assert printed(display) == ""
    states: list[WorkerState] = ["ready", "backoff", "ready"]
    for state in states:
        display.on_change(status(replica("m/0", state)))
    assert printed(display).count("is up") == 1


LINK = Link("http://127.0.0.1:8000/ui?token=" + "x" * 32, 600.0)


@pytest.mark.parametrize(("terminal", "shows"), [(True, True), (False, False)])
def test_the_link_is_for_terminals_as_other_output_may_be_a_log(
    terminal: bool, shows: bool
) -> None:
    console = Console(width=60, file=io.StringIO(), force_terminal=terminal, highlight=False)
    display = Display(console, None, WORDS, quiet=False)
    display.create_link = lambda: LINK
    for _ in range(2):
        display.on_change(status(replica("m/0", "ready")))
    assert printed(display).splitlines().count(LINK.url) == int(shows)  # whole, to be clicked on
    assert ("token" in printed(display)) is shows


def test_a_link_that_is_refused_is_not_talked_about() -> None:
    console = Console(width=60, file=io.StringIO(), force_terminal=True)
    display = Display(console, None, WORDS, quiet=False)
    display.create_link = lambda: Refused("others can reach it")
    display.on_change(status(replica("m/0", "ready")))
    assert "servekit 1" in printed(display)
    assert "administer" not in printed(display)


def test_progress_is_told_by_phase_and_not_twice(display: Display) -> None:
    def at(phase: str, done: int) -> Status:
        return status(replica("m/0", "loading", progress=Progress(phase, done, 9, "tensors")))

    with capture_logs() as lines:
        for one in (at("fetch", 1), at("fetch", 1), at("fetch", 2), at("load", 0), at("load", 0)):
            display.on_change(one)
    assert [line["progress"] for line in lines] == ["fetch 1 of 9 tensors", "load 0 of 9 tensors"]


def test_the_drain_says_how_much_is_left_and_how_to_cut_it_short(display: Display) -> None:
    with capture_logs() as lines:
        for in_flight in (3, 3, 1, 0):
            display.on_change(status(replica("m/0", "ready"), draining=True, in_flight=in_flight))
    assert [(line["event"], line["in_flight"]) for line in lines] == [
        ("requests_finishing", 3),
        ("requests_finishing", 1),
    ]


def test_banner_names_what_serves_and_what_does_not() -> None:
    text = shown(
        banner(
            status(
                replica("m/0", "ready"),
                replica("m/1", "ready"),
                replica("m/2", "failed", reason="no [weights] :here:"),
            ),
            WORDS,
            boxed=True,
        )
    )
    assert "m  2 × cpu" in text
    assert "failed: no [weights] :here:" in text
    assert "http://h:1/ui" in text
    assert "/ui" not in shown(banner(status(), BannerFacts(False, "x"), boxed=False))


@pytest.mark.parametrize("state", ["loading", "starting", "backoff", "draining"])
def test_every_model_of_the_banner_has_a_line_of_its_own(state: WorkerState) -> None:
    text = shown(banner(status(replica("m/0", state)), WORDS, boxed=False))
    [line] = [line for line in text.splitlines() if line.startswith("model")]
    assert line.split() == ["model", "m", state]


def test_picture_shows_bar_and_reason() -> None:
    text = shown(
        picture(
            status(
                replica("m/0", "loading", progress=Progress("fetch", 2**20, 2**21, "bytes")),
                replica("m/1", "backoff", reason="killed"),
            )
        )
    )
    assert "fetch 1 MiB of 2 MiB" in text
    assert "━" in text
    assert "killed" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("info", "output", {"text": "plain"})),
        ('{"event": "e", "level": "error", "a": 1}', ("error", "e", {"a": 1})),
        ('{"event": "e", "level": "nonsense"}', ("info", "e", {})),
        ('{"event": "e", "child": "x", "self": 1, "exc_info": true}', ("info", "e", {})),
        ('{"broken', ("info", "output", {"text": '{"broken'})),
        ("\x1b[31mred\x1b[0m\x07\x1b[2J", ("info", "output", {"text": "red"})),
        ('{"level": ["x"]}', ("info", "output", {"text": '{"level": ["x"]}'})),
    ],
)
def test_a_child_s_line_is_read(text: str, expected: tuple[object, ...]) -> None:
    assert read_line(text) == expected


@pytest.mark.parametrize(
    "text", ['{"a":' * 100_000, '{"event": null}', '{"event": "%s %d", "name": 1, "msg": 2}', "{}"]
)
def test_no_line_breaks_the_log(
    display: Display, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    try:
        logging_config.configure("test")
        display.on_line("m/0", text)
    finally:  # or tests that come later find their logs where this one's stderr was
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.configure(**before)
    assert "m/0" in capsys.readouterr().err


def test_tables_hold_every_process() -> None:
    one = status(replica("m/0", "ready", reason="killed by SIGKILL"))
    text = "".join(shown(table) for table in status_tables(one))
    assert "m/0" in text and "gateway/0" in text and "last: killed by SIGKILL" in text


def test_why_a_gateway_is_not_there_is_shown() -> None:
    one = status(replica("m/0", "ready"))
    refused = GatewayStatus("gateway/n", 0, "backoff", node="n", reason="the port is taken")
    back = GatewayStatus("gateway/o", 7, "ready", node="o", reason="killed by SIGKILL")
    whole = replace(one, gateways=(*one.gateways, refused, back))
    lines = "".join(shown(table) for table in status_tables(whole)).splitlines()
    found = {line.split()[0]: " ".join(line.split()) for line in lines if line}
    assert found["gateway/n"].endswith("the port is taken")
    assert found["gateway/o"].endswith("last: killed by SIGKILL")


def test_presets_are_shown_with_what_they_set() -> None:
    thinks = {"enable_thinking": False, "thinking": False}
    presets = (
        Preset("fast", {"temperature": 0.5}, "A long text.", {**thinks, "effort": "low"}),
        Preset("same", {}),
    )
    whole = status(replica("m/0", "ready"))
    whole = replace(whole, models=(replace(whole.models[0], presets=presets),))
    lines = "".join(shown(table) for table in status_tables(whole)).splitlines()
    found = {line.split()[0]: " ".join(line.split()) for line in lines if line}
    wanted = 'fast m temperature 0.5, system message, thinking false, effort "low"'
    assert found["fast"] == wanted
    assert found["same"] == "same m only its name"
    assert "fast  preset of m" in shown(banner(whole, WORDS, boxed=False))


def test_adapters_and_stray_memory_are_shown() -> None:
    whole = status(replica("m/0", "ready", stray="holds 520 MiB on GPU 0, which is not its own"))
    info = AdapterInfo("x", "BOFT", "grouped", "it mixes with no other", figures={"gap": 0.00123})
    adapters = (
        AdapterStatus("x", "/x", "serving", "", info),
        AdapterStatus("y", "/y", "failed", "its rank is 512"),
        AdapterStatus("z", "/z", "loading"),
    )
    whole = replace(whole, models=(replace(whole.models[0], adapters=adapters),))
    lines = "".join(shown(table) for table in status_tables(whole)).splitlines()
    found = {line.split()[0]: " ".join(line.split()) for line in lines if line}
    assert "holds 520 MiB on GPU 0" in found["m/0"]
    assert "x serving m BOFT grouped" in found["x"]
    assert "it mixes with no other" in found["x"]
    assert "gap" not in found["x"]  # figures are for `why`
    assert "its rank is 512" in found["y"]
    assert "loading" in found["z"]
    text = shown(banner(whole, WORDS, boxed=False))
    assert "x  adapter of m" in text
    assert "y  failed: its rank is 512" in text


def test_for_programs_fields_have_names() -> None:
    told = as_builtins(status(replica("m/0", "ready", timings_s={"load": 1.5})))
    assert json.loads(json.dumps(told))["models"][0]["replicas"][0]["timings_s"] == {"load": 1.5}


def test_figures_are_for_people() -> None:
    assert [format_size(n) for n in (0, 10, 2048, 5 * 2**20, 3 * 2**30)] == [
        *("-", "10 B", "2 KiB", "5 MiB", "3.0 GiB")
    ]
    assert progress_text(Progress("warm-up")) == "warm-up"
    model = status(replica("m/0", "ready")).models[0]
    assert replica_note(model, model.replicas[0]) == "Llama float32"
