"""Loading and unloading of adapters over HTTP, under vLLM's names.

If the file has keys, the caller needs one with `admin: true`. Without keys the endpoints refuse,
unless the file says `server: {runtime_adapters: true}`: a caller who may load from any path can
read files, and can have the engine read files that he placed there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta

from servekit.errors import Forbidden, RequestError
from servekit.gateway.api.admin.endpoints import NothingSuch, Supervisor
from servekit.gateway.api.fields import doc
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.auth.authorization import ACTING, Access
from servekit.gateway.http.asgi import (
    ErrorResponses,
    Receive,
    Scope,
    Send,
    read_body,
)
from servekit.gateway.http.response import Endpoint
from servekit.protocol.adapters import AdapterSpec, AddAdapter, RemoveAdapter
from servekit.protocol.messages import Accepted

log: Any = structlog.get_logger("servekit.gateway")

#: All workers verify the adapter, after earlier changes; the supervisor ends a change that hangs.
CHANGE_S = 3600.0
_NEEDS = (
    "adapters are loaded and unloaded with a key that has `admin: true`; where the file has no"
    " keys, by `servekit adapter` on this machine, or with `server: {runtime_adapters: true}`"
)


AdapterName = Annotated[str, doc("The name that requests use as their model", "sql")]


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True):
    """An adapter to load."""

    lora_name: AdapterName = ""
    lora_path: Annotated[str, Meta(examples=["/adapters/sql"])] = ""
    """An absolute path to a folder with adapter_config.json on servekit's machine, or a hub id."""
    base_model_name: str | None = None
    """The base model; may be left out if there is only one."""
    load_inplace: Annotated[bool, doc("Replace the adapter that has this name now")] = False
    any_base: bool = False
    """servekit's own: load the adapter even if it names another base model."""


class UnloadLoraAdapterRequest(msgspec.Struct, frozen=True):
    """An adapter to unload."""

    lora_name: AdapterName = ""


class AdapterRefused(RequestError):
    """The adapter is wrong, or its name is; nothing was changed."""


class Lora:
    """The adapter endpoints, as ASGI routes by path."""

    def __init__(self, supervisor: Supervisor, access: Access, max_body_bytes: int) -> None:
        self._supervisor = supervisor
        self._access = access
        self._max_body_bytes = max_body_bytes
        self.routes: dict[str, Endpoint] = {
            "/v1/load_lora_adapter": self.load,
            "/v1/unload_lora_adapter": self.unload,
        }

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def act(body: bytes) -> str:
            return await self._load(decode(LoadLoraAdapterRequest, body))

        await self._run_change(act, scope, receive, send)

    async def unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def act(body: bytes) -> str:
            return await self._unload(decode(UnloadLoraAdapterRequest, body))

        await self._run_change(act, scope, receive, send)

    async def _run_change(
        self, act: Callable[[bytes], Awaitable[str]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with ErrorResponses(send):
            await _send_text(send, await act(await self._body(scope, receive)))

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of an authorised request.

        The content type has to be JSON, which no web page can send across origins without a
        preflight.
        """
        require_right(self._access)
        kinds = [value for name, value in scope["headers"] if name == b"content-type"]
        if not kinds or kinds[0].partition(b";")[0].strip().lower() != b"application/json":
            raise RequestError("the body has to be sent as content-type: application/json")
        return await read_body(scope, receive, self._max_body_bytes)

    async def _load(self, request: LoadLoraAdapterRequest) -> str:
        name, path = request.lora_name, request.lora_path
        if not name or not path:
            raise RequestError(
                "Both 'lora_name' and 'lora_path' must be provided.",
                param="lora_path" if name else "lora_name",
            )
        if not path.isprintable():
            raise RequestError("'lora_path' has characters that no path has.", param="lora_path")
        log.info("adapter_load_requested", adapter=name, path=path, via="http")
        order = AddAdapter(
            request.base_model_name or "",
            AdapterSpec(name, path, any_base=request.any_base),
            request.load_inplace,
        )
        await self._supervisor.answer_to(order, Accepted, CHANGE_S, AdapterRefused)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unload(self, request: UnloadLoraAdapterRequest) -> str:
        name = request.lora_name
        if not name:
            raise RequestError(
                "'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name"
            )
        log.info("adapter_unload_requested", adapter=name, via="http")
        await self._supervisor.answer_to(RemoveAdapter(name), Accepted, CHANGE_S, NothingSuch)
        return f"Success: LoRA adapter '{name}' removed successfully."


def require_right(access: Access) -> None:
    """Raise Forbidden unless the current caller may change adapters."""
    if not access.closed and access.rules.runtime_adapters:
        return
    caller = ACTING.get()
    if caller is None or not caller.rule.admin:
        raise Forbidden(_NEEDS)


async def _send_text(send: Send, text: str) -> None:
    body = text.encode()
    head = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


OPERATIONS = (
    Operation(
        "/v1/load_lora_adapter",
        "Load an adapter on all workers of a model, or on none",
        LoadLoraAdapterRequest,
        Annotated[str, Meta(examples=["Success: LoRA adapter 'sql' added successfully."])],
        tag="adapters",
    ),
    Operation(
        "/v1/unload_lora_adapter",
        "Unload an adapter once its requests are done",
        UnloadLoraAdapterRequest,
        Annotated[str, Meta(examples=["Success: LoRA adapter 'sql' removed successfully."])],
        tag="adapters",
    ),
)
