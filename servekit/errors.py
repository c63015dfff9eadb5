"""Every error servekit raises on purpose, with its HTTP status and its OpenAI `type`.

ServekitError                     500 internal_error
├─ ConfigError                    the file is wrong: exit code 2, nothing was started
├─ StartError                     the machine is in the way (port, run directory, disk): exit code 1
│  └─ NobodyRuns                  a command needs an instance, and there is none
├─ LoadError                      a model cannot be loaded; shown by /readyz and `servekit ps`
├─ ForbiddenImport                torch and its like, in the supervisor or a gateway; an ImportError
├─ …                              400, 404, 409, 503 of administration: servekit.gateway.api.admin
├─ WireError                      a peer broke the wire protocol; its connection is closed
│  └─ NotTrusted                  or is none of this cluster; an OSError (protocol.transport.tls)
└─ RequestError                   400 invalid_request
   ├─ ContextLengthExceeded       400 context_length_exceeded
   ├─ Unsupported                 400 unsupported_parameter
   ├─ InvalidKey                  401 invalid_api_key        (WWW-Authenticate)
   ├─ Forbidden                   403 forbidden              the key does not allow it
   ├─ ModelNotFound               404 model_not_found
   ├─ …                           405, 408, 431 of HTTP itself: servekit.gateway.http
   ├─ BodyTooLarge                413 body_too_large
   ├─ ClientClosed                499 client_closed          nobody is left to read it
   ├─ QueueFull                   429 queue_full             (Retry-After)
   ├─ RateLimited                 429 rate_limit_exceeded    (Retry-After)
   ├─ SourceQuarantined           429 source_quarantined     its requests take workers down
   ├─ EngineFailed                500 engine_error           the engine gave up on this request
   ├─ RequestQuarantined          500 request_quarantined    it has taken workers down with it
   ├─ EndpointFailed              502 endpoint_error         a remote endpoint did
   ├─ WorkerLost                  503 worker_lost            died; the request can't be run again
   ├─ ModelChanged                503 model_changed          replaced in the middle of an answer
   ├─ ModelUnavailable            503 model_unavailable      (Retry-After)
   └─ DeadlineExceeded            504 timeout
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

#: Characters of what a client is told: a sentence, not its own request again.
LONGEST_MESSAGE = 1000


def describe_error(error: BaseException) -> str:
    """Say in one line which error it is: its type and the first line of its words, or ours alone.

    Libraries' errors run over many lines: advice, tensors' shapes, C++ stacks.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ServekitError) and lines:
        return lines[0][:LONGEST_MESSAGE]
    return ": ".join([type(error).__name__, *lines[:1]])[:LONGEST_MESSAGE]


class ServekitError(Exception):
    """Base of every deliberate error. `str(error)` is one sentence that a user can act on."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(ServekitError):
    """The configuration cannot be used. Raised before anything is started; exit code 2."""

    code = "config_error"


class StartError(ServekitError):
    """The service cannot start here: busy port, run directory in use, no disk. Exit code 1."""

    code = "start_error"


class NobodyRuns(StartError):
    """A command needs a running instance, and there is none."""


class LoadError(ServekitError):
    """A model cannot be loaded.

    `permanent` says that trying again without a change would fail again (a missing file, an
    unsupported architecture), so the supervisor does not restart the worker.
    """

    code = "load_error"

    def __init__(self, message: str, *, permanent: bool = True) -> None:
        super().__init__(message)
        self.permanent = permanent


class ForbiddenImport(ServekitError, ImportError):
    """A module that this process stays without, and the chain of imports that led to it.

    `except ImportError` catches it, so that optional uses of the module go on without.
    """

    code = "forbidden_import"


class WireError(ServekitError):
    """A peer sent what the wire protocol does not allow."""

    code = "wire_error"


class RequestError(ServekitError):
    """A request that is refused. `param` names the offending field, when there is one."""

    status = 400
    code = "invalid_request"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        if len(message) > LONGEST_MESSAGE:  # it names a value that the client sent
            message = message[: LONGEST_MESSAGE - 1] + "…"
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class Unsupported(RequestError):
    code = "unsupported_parameter"


class InvalidKey(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    code = "forbidden"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class ClientClosed(RequestError):
    status = 499
    code = "client_closed"


class QueueFull(RequestError):
    status = 429
    code = "queue_full"


class RateLimited(RequestError):
    status = 429
    code = "rate_limit_exceeded"


class SourceQuarantined(RequestError):
    status = 429
    code = "source_quarantined"


class EngineFailed(RequestError):
    status = 500
    code = "engine_error"


class EndpointFailed(RequestError):
    status = 502
    code = "endpoint_error"


class RequestQuarantined(RequestError):
    status = 500
    code = "request_quarantined"


class WorkerLost(RequestError):
    status = 503
    code = "worker_lost"


class ModelChanged(RequestError):
    status = 503
    code = "model_changed"


class ModelUnavailable(RequestError):
    status = 503
    code = "model_unavailable"


class DeadlineExceeded(RequestError):
    status = 504
    code = "timeout"


def _tree(root: type[RequestError]) -> dict[str, type[RequestError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


#: `code` to class, so that an error crosses the wire as (code, message, param).
REQUEST_ERRORS: dict[str, type[RequestError]] = _tree(RequestError)


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known: which one may have been meant."""
    import difflib

    close = difflib.get_close_matches(name[:128], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
