"""Administration over HTTP for keys with `admin: true`: what `servekit ps`, `why` and `reload` do.

The gateway forwards each question to the supervisor over the operators' socket. That socket belongs
to this user alone, so whoever can open it needs no key. There is no shutdown over HTTP: an instance
is ended on its machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import Response

from servekit.errors import (
    ConfigError,
    DeadlineExceeded,
    ModelUnavailable,
    RequestError,
    ServekitError,
)
from servekit.gateway.auth.authorization import Access
from servekit.protocol.messages import (
    Accepted,
    FromSupervisor,
    GetStatus,
    GetWhy,
    Refused,
    Reload,
    Restart,
    SetProfile,
    Status,
    ToSupervisor,
    Why,
)
from servekit.protocol.residency import SetResidency, Want
from servekit.protocol.transport.rpc import Way, ask_supervisor
from servekit.protocol.types import as_builtins

log: Any = structlog.get_logger("servekit.gateway")

ANSWER_S = 10.0
#: A reload loads no model, but reads the file and everything it names, after earlier reloads.
RELOAD_S = 20.0

#: A model may have to load, and other models may first have to finish their requests.
RESIDE_S = 3600.0

A = TypeVar("A", bound=FromSupervisor)


class FileRefused(ConfigError):
    """The configuration file is wrong, and nothing has changed. Correct it; the message lists every
    error.
    """

    status = 400


class NothingSuch(ServekitError):
    """The path, or a model, process or adapter of this name, does not exist. See `/docs`."""

    status = 404
    code = "not_found"


class NotNow(ServekitError):
    """The supervisor refuses at this moment; the message says why. Ask again later."""

    status = 409
    code = "conflict"


class NoSupervisor(ServekitError):
    """The supervisor does not answer: servekit is about to end. Start it again."""

    status = 503
    code = "supervisor_unavailable"


class Supervisor:
    """Questions to the supervisor over HTTP; `way` leads to it, such as the path of its socket."""

    def __init__(self, way: Way | None, access: Access) -> None:
        self._way = way
        self._access = access

    @property
    def run_dir(self) -> Path | None:
        """Return the instance's directory, which holds the socket; None on another machine."""
        return self._way.parent if isinstance(self._way, Path) else None

    async def show_status(self) -> Response:
        """Return what `servekit ps --json` prints. Raises Forbidden and what `answer_to` raises."""
        self._access.require_admin()
        return _json(as_builtins(await self.answer_to(GetStatus(), Status, ANSWER_S)))

    async def why(self, name: str) -> Response:
        """Return what `servekit why NAME --json` prints.

        Raises Forbidden, NothingSuch and the errors of `answer_to`.
        """
        self._access.require_admin()
        return _json(as_builtins(await self.answer_to(GetWhy(name), Why, ANSWER_S, NothingSuch)))

    async def reload(self) -> Response:
        """Reload the file. Raises Forbidden, FileRefused, and what `answer_to` raises."""
        caller = self._access.require_admin()
        log.info("reload_requested", key=caller.rule.name)
        done = await self.answer_to(Reload(), Accepted, RELOAD_S, FileRefused)
        return _json({"message": done.message})

    async def reside(self, want: Want, name: str, wait: bool) -> Response:
        """Change a model's residency as `servekit load NAME` and its like.

        Raises Forbidden and the errors of `answer_to`.
        """
        caller = self._access.require_admin()
        log.info("residency_requested", want=want, model=name, key=caller.rule.name)
        return await self._order(SetResidency(name, want, wait))

    async def restart(self, name: str, wait: bool) -> Response:
        """Replace a model's workers, or one of them, as `servekit restart NAME`.

        Raises Forbidden and the errors of `answer_to`.
        """
        caller = self._access.require_admin()
        log.info("restart_requested", name=name, key=caller.rule.name)
        return await self._order(Restart(name, wait))

    async def set_profile(self, name: str) -> Response:
        """Switch to a profile of the file, or to "all", as `servekit profile NAME`.

        Raises Forbidden, NothingSuch, and the errors of `answer_to`.
        """
        caller = self._access.require_admin()
        log.info("profile_requested", name=name, key=caller.rule.name)
        done = await self.answer_to(SetProfile(name), Accepted, RELOAD_S, NothingSuch)
        return _json({"message": done.message})

    async def _order(self, order: SetResidency | Restart) -> Response:
        done = await self.answer_to(order, Accepted, RESIDE_S, NothingSuch)
        return _json({"message": done.message})

    async def answer_to(
        self,
        question: ToSupervisor,
        kind: type[A],
        deadline_s: float,
        invalid: type[ServekitError] = NotNow,
    ) -> A:
        """Return the supervisor's answer, or raise `invalid` if the question itself is wrong.

        Raises NotNow, ModelUnavailable if the change is not possible yet, and the errors of
        `ask_by_way`.
        """
        if self._way is None:
            raise NoSupervisor("no supervisor is running")
        answer = await ask_by_way(self._way, question, deadline_s)
        if isinstance(answer, Refused) and answer.retry_after_s:
            raise ModelUnavailable(answer.message, retry_after_s=answer.retry_after_s)
        if isinstance(answer, Refused):
            raise (invalid if answer.invalid else NotNow)(answer.message)
        if not isinstance(answer, kind):
            raise ServekitError("the supervisor sent an answer of an unexpected type")
        return answer


async def ask_by_way(way: Way, question: ToSupervisor, deadline_s: float) -> FromSupervisor:
    """Return the answer of the supervisor that `way` leads to.

    Raises NoSupervisor if there is none, and DeadlineExceeded after `deadline_s`.
    """
    try:
        if isinstance(way, Path):
            return await ask_supervisor(way, question, deadline_s)
        return await way(question, deadline_s)
    except EOFError as error:
        raise NoSupervisor(f"{error}; try again in a moment") from None
    except TimeoutError:
        late = (
            f"the supervisor did not answer within {deadline_s:g} s; the request may still succeed"
        )
        raise DeadlineExceeded(late) from None
    except OSError:
        raise NoSupervisor(
            "the supervisor takes no requests now: servekit is shutting down"
        ) from None


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


# ---- the routes


def add_administration(app: FastAPI, supervisor: Supervisor) -> None:
    """Add GET /admin/status, /admin/why/NAME; POST /admin/reload, /admin/load/NAME and its like."""
    common: dict[str, Any] = {"tags": ["administration"], "response_model": dict[str, Any]}

    @app.get(
        "/admin/status",
        summary="All processes, as in `servekit ps --json`",
        responses=_refusals(403, 409, 503, 504),
        **common,
    )
    async def status() -> Response:
        return await supervisor.show_status()

    @app.get(
        "/admin/why/{name:path}",
        summary="The state and the exits of a model, or of a process such as MODEL/0",
        responses=_refusals(403, 404, 409, 503, 504),
        **common,
    )
    async def why(name: str) -> Response:
        return await supervisor.why(name)

    @app.post(
        "/admin/reload",
        summary="Reload the configuration file; only its changes are applied",
        responses=_refusals(400, 401, 403, 409, 429, 503, 504),
        **common,
    )
    async def reload() -> Response:
        return await supervisor.reload()

    @app.post(
        "/admin/profile/{name:path}",
        summary="Switch to a profile of the file, or to `all` models, as `servekit profile`",
        responses=_refusals(401, 403, 404, 409, 429, 503, 504),
        openapi_extra={"parameters": [_NAME]},
        **common,
    )
    async def profile(request: Request) -> Response:
        return await supervisor.set_profile(request.path_params["name"])

    for want, summary in _WANTS.items():
        _add_order(app, want, summary, partial(supervisor.reside, want))
    _add_order(app, "restart", _RESTART, supervisor.restart)


def _add_order(
    app: FastAPI, verb: str, summary: str, do: Callable[[str, bool], Awaitable[Response]]
) -> None:
    @app.post(
        f"/admin/{verb}/{{name:path}}",
        summary=summary,
        name=verb,
        tags=["administration"],
        response_model=dict[str, Any],
        responses=_refusals(400, 401, 403, 404, 409, 429, 503, 504) | _WRONG_WAIT,
        openapi_extra={"parameters": [_NAME, _WAIT]},
    )
    async def order(request: Request) -> Response:
        wait = request.query_params.get("wait", "true")
        if wait not in ("true", "false"):
            raise RequestError("wait: expected true or false", param="wait")
        return await do(request.path_params["name"], wait == "true")


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_WAIT = {
    "name": "wait",
    "in": "query",
    "description": "false: answer when it has started, not when it is done",
    "schema": {"type": "boolean", "default": True},
}


_WANTS: dict[Want, str] = {
    "load": "Load a model, as `servekit load`; answered when it is loaded, or with wait=false at"
    " once",
    "unload": "Unload a model once its requests are done, as `servekit unload`",
    "sleep": "Put a model to sleep once its requests are done, as `servekit sleep`",
    "wake": "Wake a model, as `servekit wake`",
}
_RESTART = "Replace the workers of a model, or one such as MODEL/0, as `servekit restart`"
_REFUSALS = {
    400: "The file is invalid, and nothing was changed; the message gives the reason",
    401: "An API key is needed, or this one is not known",
    403: "The key has no `admin: true`; the same for all where the file has no keys",
    404: "No model and no process has that name",
    409: "Not possible now, such as during a shutdown",
    429: "The key's limits are reached; see Retry-After",
    503: "The supervisor takes no requests now",
    504: "The supervisor did not answer in time",
}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    schema = {"$ref": "#/components/schemas/OpenAIError"}
    content = {"application/json": {"schema": schema}}
    return {code: {"description": _REFUSALS[code], "content": content} for code in statuses}


_WRONG_WAIT: dict[int | str, dict[str, Any]] = {
    400: _refusals(400)[400] | {"description": "`wait` is neither true nor false"}
}
