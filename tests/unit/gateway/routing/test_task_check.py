"""Which model serves what: the refusals before a request waits, and the models that they name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import RequestError, Unsupported
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.task_check import (
    MOST_NAMES,
    check_fetched,
    check_media,
    check_task,
    known_info,
    serves_any,
    unable,
)
from servekit.protocol.messages import (
    Media,
    ModelInfo,
    ModelStatus,
    Preset,
    SamplingParams,
    Topology,
)
from servekit.protocol.types import Capability
from tests.unit.gateway.conftest import Service

INFO = ModelInfo(100, 1, True, "a", "float32", "cpu")
PICTURE, SOUND = Media(b"1", "image/png"), Media(b"2", "audio/wav")


def model(name: str, *serves: Capability, **fields: Any) -> ModelStatus:
    info = replace(INFO, serves=serves) if serves else None
    return ModelStatus(name, "echo", "-", 0, (), info, **fields)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router("gateway/test")
    yield router
    serve(router)


def serve(router: Router, *models: ModelStatus) -> None:
    router.apply_topology(Topology(models))


def check(router: Router, name: str, task: str = "") -> None:
    call = InflightRequest(name, SamplingParams(), prompt="x", more={"task": task} if task else {})
    check_task(router.find(name), call, router.models)


def refused(router: Router, name: str, task: str = "") -> str:
    with pytest.raises(Unsupported) as error:
        check(router, name, task)
    assert error.value.param == "model"
    return error.value.message


async def test_a_model_is_asked_for_what_it_serves(router: Router) -> None:
    serve(router, model("talks", "generate"), model("maps", "embed"))
    check(router, "talks")
    check(router, "maps", "embed")
    assert refused(router, "maps") == (
        "model: the echo engine of 'maps' does not generate text;"
        " it is an embedding model, for /v1/embeddings; models that do: 'talks'"
    )
    assert "models that do: 'maps'" in refused(router, "talks", "embed")
    assert "models that do: none that is known" in refused(router, "talks", "score")


async def test_a_model_that_was_never_loaded_may_serve_anything(router: Router) -> None:
    serve(router, model("new"))
    check(router, "new")
    check(router, "new", "score")
    assert not serves_any(router.find("new"), ("generate", "score"))


async def test_a_preset_is_for_models_that_generate(router: Router) -> None:
    serve(
        router,
        model("maps", "embed", presets=(Preset("p", {}),)),
        model("talks", "generate", presets=(Preset("q", {}),)),
    )
    assert "does not generate text" in refused(router, "p", "embed")
    check(router, "q")
    assert "does not make embeddings" in refused(router, "q", "embed")


async def test_no_more_models_are_named_than_one_can_read(router: Router) -> None:
    many = [model(f"m{number}", "embed") for number in range(MOST_NAMES + 1)]
    serve(router, model("talks", "generate"), *many)
    said = refused(router, "talks", "embed")
    assert f"'m{MOST_NAMES - 1}'" in said and f"'m{MOST_NAMES}'" not in said


async def test_a_model_that_serves_any_of_some_tasks_is_named(router: Router) -> None:
    serve(router, model("talks", "generate"), model("ranks", "score"), model("maps", "embed"))
    route = router.find("talks")
    info = known_info(route)
    assert info is not None
    error = unable(route, info, ("score", "embed"), router.models())
    assert error.message.endswith("models that do: 'ranks', 'maps'")
    assert "does not score or rerank documents" in error.message
    assert serves_any(router.find("ranks"), ("embed", "score"))
    assert not serves_any(route, ("embed", "score"))


async def test_what_a_worker_has_told_is_known_before_the_supervisor_tells_it(
    service: Service,
) -> None:
    await service.up()
    route = service.router.find("m")
    assert route.status.info is None
    info = known_info(route)
    assert info is not None and info.architecture == "echo"
    assert serves_any(route, ("generate",))


# ---------------------------------------------------------------- images and recordings


def check_all(router: Router, name: str, *media: Media, most: int = 2) -> None:
    check_media(router.find(name), media, most, router.models)


@pytest.mark.parametrize(
    ("media", "said"),
    [
        ((PICTURE,) * 3, "messages: 3 images are over the limit of 2; see server.limits.images"),
        ((SOUND,) * 3, "messages: 3 recordings are over the limit of 2"),
        ((SOUND, PICTURE, SOUND), "messages: 3 images and recordings are over the limit of 2"),
    ],
)
async def test_too_many_images_and_recordings_are_refused_together(
    router: Router, media: tuple[Media, ...], said: str
) -> None:
    serve(router, model("sees", "generate", "images", "audio"))
    check_all(router, "sees", *media[:2])
    with pytest.raises(RequestError) as error:
        check_all(router, "sees", *media)
    assert error.value.message.startswith(said)
    assert error.value.param == "messages"


async def test_a_model_that_takes_none_is_refused_and_those_that_do_are_named(
    router: Router,
) -> None:
    serve(router, model("talks", "generate"), model("sees", "images"), model("new"))
    check_all(router, "new", PICTURE, SOUND)
    check_all(router, "talks")
    with pytest.raises(Unsupported, match="takes no images; models that do: 'sees'"):
        check_all(router, "talks", PICTURE)
    with pytest.raises(Unsupported, match="takes no recordings; models that do: none that is"):
        check_all(router, "sees", PICTURE, SOUND)


def test_an_image_that_was_not_fetched_is_refused() -> None:
    check_fetched([PICTURE, SOUND])
    with pytest.raises(Unsupported, match=r"send the image itself, as data:image/png"):
        check_fetched([PICTURE, Media(b"", "", address="https://images.example/a.png")])
