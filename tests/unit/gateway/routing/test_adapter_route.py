"""Adapters at the gateway: models of their own by name, their base's queue and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from servekit.config.keys import fast_digest
from servekit.errors import (
    Forbidden,
    InvalidKey,
    ModelNotFound,
    ModelUnavailable,
    Unsupported,
)
from servekit.gateway.app import Application
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.routing.adapter_route import AdapterRoute
from servekit.gateway.routing.failures.quarantine import fingerprint
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.ui.status_html import list_choices
from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterSpec,
    AdapterState,
    AdapterStatus,
)
from servekit.protocol.messages import (
    AccessRules,
    ChatMessage,
    KeyRule,
    Media,
    ModelInfo,
    ModelStatus,
    SamplingParams,
    Topology,
)
from tests.unit.gateway.conftest import EchoWorker, Service, until

SALT = b"s" * 32


def status(name: str = "x", state: AdapterState = "serving", reason: str = "") -> AdapterStatus:
    return AdapterStatus(name, f"/{name}", state, reason)


def tell(service: Service, *adapters: AdapterStatus, rules: AccessRules | None = None) -> None:
    """The workers there are, and these adapters."""
    replicas = tuple(worker.status() for worker in service.workers)
    model = ModelStatus("m", "echo", "-", 0, replicas, aliases=("alias",), adapters=adapters)
    service.router.apply_topology(Topology((model,), access=rules or AccessRules()))


async def up(service: Service, folder: Path, workers: int = 1, **options: Any) -> list[EchoWorker]:
    """Workers that have an adapter `x`."""
    path = folder / "x"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    started = await service.up(
        workers, said={"adapters": (AdapterSpec("x", str(path)),)}, **options
    )
    tell(service, status())
    return started


def ask(model: str, prompt: str = "abc", tokens: int = 3) -> InflightRequest:
    return InflightRequest(model, SamplingParams(max_tokens=tokens), prompt=prompt, stream=False)


async def text(call: InflightRequest) -> str:
    return (await call.next_delta()).text


async def test_it_answers_under_its_name_and_its_base_as_ever(
    service: Service, tmp_path: Path
) -> None:
    await up(service, tmp_path)
    router = service.router
    assert [await text(router.queue_call(ask(name))) for name in ("x", "m", "alias")] == [
        "ABC",
        "abc",
        "abc",
    ]
    route = router.find("x")
    assert (route.status.name, route.status.path, route.ready) == ("x", "/x", True)
    assert [one.status.name for one in router.models()] == ["m", "x"]
    assert [name for _, name in list_choices(router)] == ["m", "x"]
    assert set(router.routes) == {"m"}  # one queue for both


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("failed", ModelUnavailable, "the adapter 'x' cannot serve: wrong rank"),
        ("loading", ModelUnavailable, "the adapter 'x' is being loaded"),
        ("unloading", ModelNotFound, "the models are: m"),
    ],
)
async def test_one_that_does_not_serve(
    service: Service, tmp_path: Path, state: AdapterState, error: type[Exception], words: str
) -> None:
    await up(service, tmp_path)
    tell(service, status(state=state, reason="wrong rank"))
    with pytest.raises(error, match=words):
        service.router.queue_call(ask("x"))
    assert [one.status.name for one in service.router.models()] == ["m"]
    assert await text(service.router.queue_call(ask("m"))) == "abc"


async def test_a_call_goes_on_with_its_adapter_where_its_worker_dies(
    service: Service, tmp_path: Path
) -> None:
    first, second = await up(service, tmp_path, workers=2, step_s=0.002)
    call = service.router.queue_call(ask("x", "abcd", 60))
    await until(lambda: len(call.emitted) > 4)
    (first if first.running else second).kill()
    assert await text(call) == "ABCD" * 15


async def test_the_supervisor_hears_when_it_is_not_needed_any_more(
    service: Service, tmp_path: Path
) -> None:
    unused: list[str] = []
    service.router._farewells._tell = unused.append
    await up(service, tmp_path, step_s=0.005)
    call = service.router.queue_call(ask("x", tokens=40))
    other = service.router.queue_call(ask("m", tokens=2000))
    tell(service, status(state="unloading"))
    await until(lambda: len(call.emitted) > 2)
    assert unused == []
    assert await text(call) == ("abc" * 14)[:40].upper()
    await until(lambda: unused == ["x"])
    tell(service, status(state="unloading"), status("y"))
    tell(service, status())
    tell(service, status(state="loading"))
    await until(lambda: unused == ["x", "x"])
    assert not other.done
    other.cancel()


def test_a_fingerprint_is_of_the_adapter_too() -> None:
    plain, adapted = ask("m"), ask("x")
    adapted.more = {"adapter": "x"}
    assert fingerprint("m", plain) != fingerprint("m", adapted)
    assert not plain.same_as(adapted)


async def test_who_may_use_it(service: Service, tmp_path: Path) -> None:
    """By its own name, or by its base's; a key for the one alone may not use the base."""
    await up(service, tmp_path)
    keys = {"both": ("m",), "one": ("x",), "none": ("other",)}
    rules = AccessRules(
        tuple(
            KeyRule(name, digest=fast_digest(name.encode(), SALT), models=models)
            for name, models in keys.items()
        ),
        salt=SALT,
    )
    tell(service, status(), rules=rules)
    router = service.router
    with pytest.raises(InvalidKey):
        router.queue_call(ask("x"))
    seen = {}
    for name in keys:
        ACTING.set(router.access.callers[name])
        seen[name] = [one.status.name for one in router.models()]
        if name == "none":
            with pytest.raises(Forbidden):
                router.queue_call(ask("x"))
        else:
            assert await text(router.queue_call(ask("x"))) == "ABC"
    assert seen == {"both": ["m", "x"], "one": ["x"], "none": []}
    ACTING.set(router.access.callers["one"])
    with pytest.raises(Forbidden):
        router.queue_call(ask("m"))


async def test_how_it_is_listed(service: Service, tmp_path: Path) -> None:
    await up(service, tmp_path)
    app = Application(service.router, 10**6, ui=False)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["root"], one["parent"], one["state"]) for one in listed] == [
            ("m", "-", None, "ready"),
            ("x", "/x", "m", "ready"),
        ]
        assert (await http.get("/v1/models/x")).json() == listed[1]
        tags = (await http.get("/api/tags")).json()["models"]
        assert [(tag["name"], tag["details"]["parent_model"]) for tag in tags] == [
            ("m:latest", ""),
            ("x:latest", "m"),
        ]
        ready = (await http.get("/readyz")).json()
        assert ready["models"]["m"]["adapters"] == {"x": "serving"}
        body = {"model": "x", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("x", "ABC")
        pull = await http.post("/api/pull", json={"model": "x"})
        assert pull.json() == {"status": "success"}
        tell(service, status(state="failed", reason="wrong rank"))
        pull = await http.post("/api/pull", json={"model": "x"})
        assert (pull.status_code, "wrong rank" in pull.json()["error"]) == (503, True)
        refused = await http.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        assert "wrong rank" in refused.text


def test_virtual_tokens_take_room_in_its_context_and_have_no_media() -> None:
    known = ModelInfo(100, 4, True, "echo", "none", "cpu", serves=("generate", "images", "audio"))
    base = ModelStatus("m", "echo", "-", 7, (), known)
    info = AdapterInfo("x", "PROMPT_TUNING", "mixed", "", virtual_tokens=5)
    adapted = AdapterRoute(ModelQueue(base), replace(status(), info=info, since=9.5)).status
    assert adapted.info is not None
    assert adapted.info.max_context == 95
    assert adapted.info.serves == ("generate",)
    assert adapted.created == 9
    low_rank = AdapterRoute(ModelQueue(base), status()).status
    assert low_rank.info == known


async def test_media_for_virtual_tokens_are_refused_at_once(
    service: Service, tmp_path: Path
) -> None:
    await up(service, tmp_path)
    [known] = [one.info for one in service.router.routes["m"].replicas.values()]
    assert known is not None
    info = AdapterInfo("x", "PROMPT_TUNING", "mixed", "", virtual_tokens=5)
    model = service.router.routes["m"].status
    seeing = replace(known, serves=(*known.serves, "images"))
    adapters = (replace(status(), info=info), status("y"))
    service.router.apply_topology(Topology((replace(model, info=seeing, adapters=adapters),)))
    message = ChatMessage("user", "See", media=(Media(b"", "image/png"),))
    with pytest.raises(Unsupported, match="of 'x' takes no images; models that do: 'm', 'y'"):
        service.router.queue_call(replace_messages(ask("x"), message))
    service.router.queue_call(replace_messages(ask("y"), message)).cancel()


def replace_messages(call: InflightRequest, message: ChatMessage) -> InflightRequest:
    call.messages = [message]
    return call
