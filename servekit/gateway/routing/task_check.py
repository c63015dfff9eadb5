"""The check that a model serves a request's task and media, before the request waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from servekit.errors import RequestError, Unsupported
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.preset_route import PresetRoute
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol import tasks
from servekit.protocol.messages import Media, ModelInfo
from servekit.protocol.types import Capability, Task

#: The most models that a refusal names.
MOST_NAMES = 8


def known_info(route: ModelQueue) -> ModelInfo | None:
    """Return a model's properties, as a connected worker has told them if not the supervisor."""
    if (info := route.status.info) is not None:
        return info
    return next((one.info for one in route.replicas.values() if one.info is not None), None)


def serves_any(route: ModelQueue, wanted: Iterable[Capability]) -> bool:
    """Return whether a model serves any of `wanted`; False if that is not known yet."""
    info = known_info(route)
    return info is not None and any(task in info.serves for task in wanted)


def check_task(
    route: ModelQueue, call: InflightRequest, list_models: Callable[[], Iterable[ModelQueue]]
) -> None:
    """Raise Unsupported if the model of a call is known not to serve its task.

    A preset is for models that generate, whatever its call asks for.
    """
    info = route.status.info
    task: Task = call.more.get("task", "generate") if call.more else "generate"
    if isinstance(route, PresetRoute) and info is not None and "generate" not in info.serves:
        task = "generate"
    if info is not None and task not in info.serves:
        raise unable(route, info, (task,), list_models())


def check_media(
    route: ModelQueue,
    media: Sequence[Media],
    most: int,
    list_models: Callable[[], Iterable[ModelQueue]],
) -> None:
    """Raise RequestError for too many images and recordings, or a model known to take none."""
    modalities = sorted({one.modality for one in media}, reverse=True)
    if len(media) > most:
        nouns = " and ".join(tasks.NOUNS[one] for one in modalities)
        message = (
            f"messages: {len(media)} {nouns} are over the limit of {most}; see server.limits.images"
        )
        raise RequestError(message, param="messages")
    info = route.status.info
    for modality in modalities:
        if info is not None and modality not in info.serves:
            able = _name_able(list_models(), (modality,))
            status = route.status
            said = tasks.explain_no_media(modality, status.engine, status.name, able)
            raise Unsupported(said, param="messages")


def check_fetched(media: Iterable[Media]) -> None:
    """Raise Unsupported for an image that is given by its address, and has not been fetched."""
    if any(one.address for one in media):
        raise Unsupported(
            "messages: an image is fetched only for an answer, and from the hosts of"
            " server.fetch_images; send the image itself, as data:image/png;base64,…",
            param="messages",
        )


def unable(
    route: ModelQueue, info: ModelInfo, wanted: tuple[Task, ...], models: Iterable[ModelQueue]
) -> Unsupported:
    """Return the refusal of a model that serves none of the tasks; it names models that do."""
    status, able = route.status, _name_able(models, wanted)
    said = tasks.explain_refusal(wanted[0], status.engine, status.name, info.serves, able)
    return Unsupported(said, param="model")


def _name_able(models: Iterable[ModelQueue], wanted: Iterable[Capability]) -> str:
    """Return the names of the models that serve any of `wanted`."""
    able = [repr(one.status.name) for one in models if serves_any(one, wanted)]
    return ", ".join(able[:MOST_NAMES]) or "none that is known"
