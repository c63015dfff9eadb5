"""The exception classes of servekit, with their HTTP statuses and OpenAI `type`s.

ServekitError                     500 internal_error
├─ ConfigError                    the file is wrong: exit code 2, nothing was started
├─ StartError                     the machine is in the way (port, run directory, disk): exit code 1
│  └─ NobodyRuns                  a command needs a running instance, and there is none
├─ LoadError                      a model cannot be loaded; shown by /readyz and `servekit ps`
├─ ForbiddenImport                torch etc. imported in the supervisor or a gateway; an ImportError
├─ …                              400, 404, 409, 503 of administration: servekit.gateway.api.admin
├─ WireError                      a peer broke the wire protocol; its connection is closed
│  └─ NotTrusted                  a peer is not of this cluster; an OSError (protocol.transport.tls)
└─ RequestError                   400 invalid_request
   ├─ ContextLengthExceeded       400 context_length_exceeded
   ├─ Unsupported                 400 unsupported_parameter
   ├─ InvalidKey                  401 invalid_api_key        (WWW-Authenticate)
   ├─ Forbidden                   403 forbidden              the key does not allow the request
   ├─ ModelNotFound               404 model_not_found
   ├─ …                           405, 408, 431 of HTTP itself: servekit.gateway.http
   ├─ BodyTooLarge                413 body_too_large
   ├─ ClientClosed                499 client_closed          the client has disconnected
   ├─ QueueFull                   429 queue_full             (Retry-After)
   ├─ RateLimited                 429 rate_limit_exceeded    (Retry-After)
   ├─ SourceQuarantined           429 source_quarantined     its requests crash workers
   ├─ EngineFailed                500 engine_error           the engine failed on this request
   ├─ RequestQuarantined          500 request_quarantined    the request has crashed workers
   ├─ EndpointFailed              502 endpoint_error         a remote endpoint failed
   ├─ WorkerLost                  503 worker_lost            the worker died; no retry is possible
   ├─ ModelChanged                503 model_changed          the model was replaced mid-answer
   ├─ ModelUnavailable            503 model_unavailable      (Retry-After)
   └─ DeadlineExceeded            504 timeout
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

#: Maximum characters of an error message: it must not echo a whole request to the client.
LONGEST_MESSAGE = 1000


def describe_error(error: BaseException) -> str:
    """Describe an error in one line: its type and the first line of its message.

    A ServekitError is described by its message alone. Errors of libraries span many lines (advice,
    tensor shapes, C++ stacks); only the first line is kept.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ServekitError) and lines:
        return lines[0][:LONGEST_MESSAGE]
    return ": ".join([type(error).__name__, *lines[:1]])[:LONGEST_MESSAGE]


class ServekitError(Exception):
    """A fault of servekit. Report it, with the request id and the log.

    The base of all deliberate errors. `str(error)` is one sentence that a user can act on.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(ServekitError):
    """The configuration cannot be used. Raised before any process is started; exit code 2."""

    code = "config_error"


class StartError(ServekitError):
    """The service cannot start here: busy port, run directory in use, no disk. Exit code 1."""

    code = "start_error"


class NobodyRuns(StartError):
    """A command needs a running instance, and there is none."""


class LoadError(ServekitError):
    """A model cannot be loaded.

    `permanent` means that a retry without a change would fail again (a missing file, an
    unsupported architecture), so the supervisor does not restart the worker.
    """

    code = "load_error"

    def __init__(self, message: str, *, permanent: bool = True) -> None:
        super().__init__(message)
        self.permanent = permanent


class ForbiddenImport(ServekitError, ImportError):
    """The import of a module that is forbidden in this process, with the import chain that led to
    it.

    Also an ImportError, so that code with an optional use of the module continues without it.
    """

    code = "forbidden_import"


class WireError(ServekitError):
    """A peer sent what the wire protocol does not allow."""

    code = "wire_error"


class RequestError(ServekitError):
    """The request is not valid. Correct it; the message says what is wrong.

    `param` names the offending field, if there is one. The base of all errors that clients see.
    """

    status = 400
    code = "invalid_request"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        if len(message) > LONGEST_MESSAGE:  # a message may quote the client's value
            message = message[: LONGEST_MESSAGE - 1] + "…"
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class ContextLengthExceeded(RequestError):
    """The prompt, or the prompt with its answer, is longer than the context of the model. Shorten
    it, or ask for fewer tokens.
    """

    code = "context_length_exceeded"


class Unsupported(RequestError):
    """The model, its engine or servekit does not serve a parameter of the request. Leave it out;
    the message names it.
    """

    code = "unsupported_parameter"


class InvalidKey(RequestError):
    """The request has no valid API key. Send one as `Authorization: Bearer KEY` or `x-api-key:
    KEY`.
    """

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key may not do this, or the request comes from the page of another site. Use another key,
    or change the key in the file.
    """

    status = 403
    code = "forbidden"


class ModelNotFound(RequestError):
    """No model or adapter that the key may use has this name. `GET /v1/models` lists the names."""

    status = 404
    code = "model_not_found"


class BodyTooLarge(RequestError):
    """The body is over `server.max_body_bytes`. Send less, or raise the limit."""

    status = 413
    code = "body_too_large"


class ClientClosed(RequestError):
    """The request was cancelled: its client has disconnected or stopped it, or another choice of
    the same request has failed. No client receives this; metrics and traces show it.
    """

    status = 499
    code = "client_closed"


class QueueFull(RequestError):
    """The queue of the model is full. Send the request again after `Retry-After`; if it happens
    often, add replicas or raise `models[].max_queue`.
    """

    status = 429
    code = "queue_full"


class RateLimited(RequestError):
    """The key or the address has used up its share. Send the request again after `Retry-After`."""

    status = 429
    code = "rate_limit_exceeded"


class SourceQuarantined(RequestError):
    """Requests of this key or address have killed workers again and again. Find the request that
    does; wait for the time in the message.
    """

    status = 429
    code = "source_quarantined"


class EngineFailed(RequestError):
    """The engine failed on this request. Send it again; if it fails again, see `servekit why
    MODEL`.
    """

    status = 500
    code = "engine_error"


class EndpointFailed(RequestError):
    """The remote endpoint of the model failed, or answered with an error. The message has its
    words.
    """

    status = 502
    code = "endpoint_error"


class RequestQuarantined(RequestError):
    """Workers died each time they ran this request. Change it, or tell the operator its
    fingerprint, which the message has.
    """

    status = 500
    code = "request_quarantined"


class WorkerLost(RequestError):
    """The worker died, and the request can neither run again nor continue. Send it again."""

    status = 503
    code = "worker_lost"


class ModelChanged(RequestError):
    """The model was replaced after part of the answer was sent. Send the request again."""

    status = 503
    code = "model_changed"


class ModelUnavailable(RequestError):
    """The model cannot serve now: it loads, rests after crashes, or has failed. Send the request
    again after `Retry-After`; `/readyz` and `servekit why MODEL` have the reason.
    """

    status = 503
    code = "model_unavailable"


class DeadlineExceeded(RequestError):
    """The request was not done within its time (`models[].timeout_s`, or the timeout of the
    request). Raise the limit, or ask for less.
    """

    status = 504
    code = "timeout"


def _error_tree(root: type[RequestError]) -> dict[str, type[RequestError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _error_tree(child)
    return found


#: `code` to class: on the wire an error is (code, message, param).
REQUEST_ERRORS: dict[str, type[RequestError]] = _error_tree(RequestError)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a "did you mean" suffix for an error about an unknown name, or ""."""
    import difflib

    close = difflib.get_close_matches(name[:128], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
