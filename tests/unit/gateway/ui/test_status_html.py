"""What the page says of workers and answers: true, and escaped."""

from __future__ import annotations

import pytest

from servekit.gateway.routing.router import Router
from servekit.gateway.ui.pages.language import SAY_ENGLISH
from servekit.gateway.ui.status_html import (
    error_note,
    explain_unable,
    list_choices,
    progress_note,
    render_status,
)
from servekit.gateway.ui.widgets.request_runner import Progress
from servekit.protocol import messages as wire
from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.types import Capability


def replica(state: wire.WorkerState, **fields: object) -> wire.ReplicaStatus:
    return wire.ReplicaStatus("m/0", state, "/nowhere.sock", 1, "cpu", **fields)  # type: ignore[arg-type]


def told(*replicas: wire.ReplicaStatus) -> Router:
    router = Router("gateway/test")
    router.apply_topology(wire.Topology((wire.ModelStatus("m", "echo", "-", 0, replicas),)))
    return router


async def test_a_loading_worker_has_a_bar_and_the_choice_says_so() -> None:
    router = told(replica("loading", progress=wire.Progress("fetch", 30, 120, "bytes")))
    assert '<progress aria-label="m/0" value="30" max="120">' in render_status(router, "m")
    assert list_choices(router) == [("m · fetching, 25 %", "m")]
    unknown = told(replica("loading", progress=wire.Progress("warm-up")))
    assert '<progress aria-label="m/0"></progress>' in render_status(unknown, "m")


async def test_reasons_and_restarts_are_shown_and_escaped() -> None:
    html = render_status(told(replica("backoff", reason="<script>x</script>", restarts=2)), "m")
    assert "&lt;script&gt;x&lt;/script&gt;" in html
    assert "<script" not in html
    assert "2 restarts" in html
    assert "restarting" in html
    assert "<" not in error_note("<b>")[len('<p class="sk-note sk-error" role="alert">') : -4]


async def test_load_and_memory_of_a_worker() -> None:
    router = told(replica("ready", running=3, waiting=1, rss_bytes=1_700_000_000))
    assert "cpu · 3 running · 1 waiting · 1.6 GiB" in render_status(router, "m")
    assert "5.0 GiB" in render_status(
        told(replica("ready", rss_bytes=2**30, gpu_bytes=5 * 2**30)), "m"
    )
    for route in (*router.routes.values(),):
        for one in route.replicas.values():
            one.retire()


async def test_no_models_and_shutting_down() -> None:
    router = Router("gateway/test")
    assert list_choices(router) == []
    assert "first model" in render_status(router, "m")
    router.apply_topology(wire.Topology((), draining=True))
    assert "shutting down" in render_status(router, "m")


async def test_adapters_are_choices_of_their_own_and_what_fails_is_told() -> None:
    router = Router("gateway/test")
    adapters = (
        AdapterStatus("x", "/x", "serving"),
        AdapterStatus("y", "/y", "failed", "its <rank> is 512"),
        AdapterStatus("z", "/z", "unloading"),
    )
    model = wire.ModelStatus("m", "echo", "-", 0, (replica("loading"),), adapters=adapters)
    router.apply_topology(wire.Topology((model,)))
    assert "adapters: x, y (its &lt;rank&gt; is 512), z (unloading)" in render_status(router, "m")
    assert list_choices(router) == [
        ("m · loading", "m"),
        ("x · loading", "x"),
        ("y · failed", "y"),
    ]


async def test_a_model_without_eyes_names_those_that_have_them() -> None:
    def blind(*seeing: str) -> list[str]:
        models = [
            wire.ModelStatus(name, "echo", "-", 0, (), info(name in seeing)) for name in "abc"
        ]
        router.apply_topology(wire.Topology((*models, wire.ModelStatus("new", "echo", "-", 0, ()))))
        return [
            explain_unable(router, SAY_ENGLISH, None, name, "images")
            for name in ("a", "b", "new", "x")
        ]

    def info(sees: bool) -> wire.ModelInfo:
        serves: tuple[Capability, ...] = ("generate", "images") if sees else ("generate",)
        return wire.ModelInfo(100, 1, True, "echo", "none", "cpu", serves=serves)

    router = Router("gateway/test")
    no, others = "The model 'a' takes no images", ". Models that do: b, c."
    assert blind("b", "c") == [no + others, "", "", ""]
    alone = ", and no other model here does."
    assert blind() == [no + alone, f"The model 'b' takes no images{alone}", "", ""]


@pytest.mark.parametrize(
    ("progress", "busy", "sentence"),
    [
        (Progress(waiting=0), True, "Your request is next"),
        (Progress(waiting=1), True, "1 request before yours"),
        (Progress(waiting=3), True, "3 requests before yours"),
        (Progress(), True, "Reading the prompt…"),
        (Progress(finish="cancelled"), False, "Stopped"),
        (Progress(), False, "Stopped"),  # before there was a request
        (Progress(finish="stop"), False, "0 tokens"),  # it is the model that said nothing
        (Progress(None, 1, 0.5), True, "1 token · first after 500 ms"),
        (Progress(None, 9, 1.25, 8.0), True, "9 tokens · 8.0 tokens/s · first after 1.25 s"),
        (
            Progress(None, 9, 1.0, None, "length"),
            False,
            "9 tokens · first after 1 s · length limit reached",
        ),
    ],
)
def test_where_an_answer_is(progress: Progress, busy: bool, sentence: str) -> None:
    assert f">{sentence}<" in progress_note(progress, busy=busy)


async def test_a_request_waits_for_its_model_and_for_others() -> None:
    router = told(replica("loading", progress=wire.Progress("load", 3, 10, "steps")))
    waiting = Progress(waiting=0, route=router.find("m"))
    assert ">Waiting for m · loading, 30 %<" in progress_note(waiting, busy=True)
    behind = Progress(waiting=2, route=router.find("m"))
    assert "30 % · 2 requests before yours<" in progress_note(behind, busy=True)


async def test_only_the_chosen_model_is_shown_and_its_past_is_not() -> None:
    router = Router("gateway/test")
    ready = replica("ready", reason="killed by SIGKILL", restarts=1)
    models = [wire.ModelStatus(name, "echo", "-", 0, (ready,)) for name in ("m", "other")]
    router.apply_topology(wire.Topology(tuple(models)))
    html = render_status(router, "m")
    assert "other" not in html
    assert "SIGKILL" not in html
    assert "1 restart" in html
    assert render_status(router, "unknown") == render_status(router, None) == ""
    trouble = told(replica("ready", reason="killed by SIGKILL", trouble="its <endpoint> is away"))
    assert "its &lt;endpoint&gt; is away" in render_status(trouble, "m")
    for one in (router, trouble):
        for route in one.routes.values():
            for worker in route.replicas.values():
                worker.retire()


async def test_servers_with_the_endpoint_transcribe_too() -> None:
    def model(name: str, **more: object) -> wire.ModelStatus:
        return wire.ModelStatus(name, "command", "-", 0, (replica("ready"),), **more)  # type: ignore[arg-type]

    chats = wire.ModelInfo(10, 1, True, "a", "none", "cpu")
    hears = wire.ModelInfo(10, 1, False, "a", "none", "cpu", serves=("transcribe",))
    router = Router("gateway/test")
    models = (
        model("chat", info=chats),
        model("whisper", info=hears),
        model("cpp", info=chats, endpoints=("/v1/audio/transcriptions",)),
        model("any", info=chats, endpoints=("/v1/*",)),
    )
    router.apply_topology(wire.Topology((model("later"), *models)))
    names = [name for _, name in list_choices(router, task="transcribe")]
    assert names == ["whisper", "cpp", "later"]  # what is known to serve comes first
