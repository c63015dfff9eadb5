"""Checks before the load: the server, its list of models, and the length of its tokens."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Sequence

import msgspec

from servekit.bench.client.client_protocol import PATHS, Asking, Target
from servekit.bench.client.connection_pool import CONNECT_S, tls_context
from servekit.bench.client.response_schemas import AnswerSchema, decode_answer, message_of
from servekit.bench.prompts import Prompts
from servekit.errors import ConfigError, StartError

#: Prompt lengths for calibration, in assumed tokens of four characters.
_SHORT, _LONG = 16, 128
#: Maximum models named in a message.
_NAMED = 20


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def list_models(target: Target) -> list[str] | None:
    """Return the names of the models; None if the server has no list. Raises StartError."""
    status, body = _send_request(target, "GET", f"{target.base}/models", None, CONNECT_S)
    if status in (401, 403):
        raise StartError(_describe_refusal(target, status, body))
    if status in (404, 405, 501):
        return None
    try:
        if status != 200:
            raise msgspec.DecodeError(f"HTTP {status}: {message_of(body)}")
        return [model.id for model in msgspec.json.decode(body, type=_Models).data]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartError(
            f"{target.url} does not speak OpenAI's API: GET {target.base}/models returns no list"
            f" of models ({error})"
        ) from None


def choose_model(wanted: str | None, known: Sequence[str] | None, url: str) -> str:
    """Return the model to use. Raises ConfigError, which lists the available ones."""
    if known is None:
        if wanted is None:
            raise ConfigError(f"{url} lists no models: name one with --model")
        return wanted
    if wanted is None and len(known) == 1:
        return known[0]
    if wanted in known:
        return str(wanted)
    names = ", ".join(known[:_NAMED]) + (", …" if len(known) > _NAMED else "")
    there = f"there are: {names}" if known else "it has none"
    if wanted is None:
        raise ConfigError(f"{url} has several models: name one with --model; {there}")
    raise ConfigError(f"{url} has no model {wanted!r}; {there}")


def calibrate_tokens(target: Target, asking: Asking, seed: int, timeout_s: float) -> Asking:
    """Calibrate the length of tokens by two short requests and the server's token counts.

    They also prove that the server answers such requests. Raises StartError.
    """
    if asking.dataset is not None:
        _count_tokens(target, asking, seed, 0, timeout_s)
        return asking
    short, first = _count_tokens(target, asking, seed, _SHORT, timeout_s)
    long, second = _count_tokens(target, asking, seed, _LONG, timeout_s)
    if first is None or second is None or second <= first:
        return asking  # without counts, four characters per token
    token_chars = (long - short) / (second - first)
    overhead = max(0.0, first - short / token_chars)
    return msgspec.structs.replace(asking, token_chars=token_chars, overhead_tokens=overhead)


def _count_tokens(
    target: Target, asking: Asking, seed: int, tokens: int, timeout_s: float
) -> tuple[int, int | None]:
    """Return the characters of a prompt, and the server's count of its tokens."""
    sizes = msgspec.structs.replace(
        asking,
        stream=False,
        prompt_tokens=msgspec.structs.replace(asking.prompt_tokens, kind="fixed", a=tokens or 1),
        output_tokens=msgspec.structs.replace(asking.output_tokens, kind="fixed", a=1),
        shared_prefix_tokens=0,
    )
    body = Prompts(sizes, seed).conversation(0).next_body()
    path = target.base + PATHS[asking.api]
    status, answered = _send_request(target, "POST", path, body, timeout_s)
    answer = _check_answer(target, path, status, answered)
    return tokens * 4, None if answer.usage is None else answer.usage.prompt_tokens


def _check_answer(target: Target, path: str, status: int, body: bytes) -> AnswerSchema:
    if status in (401, 403):
        raise StartError(_describe_refusal(target, status, body))
    if status != 200:
        raise StartError(f"{target.url} answers POST {path} with HTTP {status}: {message_of(body)}")
    try:
        answer = decode_answer(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartError(f"{target.url} does not speak OpenAI's API: {error}") from None
    if answer.failed:
        raise StartError(f"{target.url} answers POST {path} with an error: {message_of(body)}")
    if not answer.is_answer:
        raise StartError(f"{target.url} does not speak OpenAI's API: its answer has no choices")
    return answer


def _describe_refusal(target: Target, status: int, body: bytes) -> str:
    what = "wants another key" if target.key else "wants a key"
    return (
        f"{target.url} {what} (HTTP {status}: {message_of(body)}): put it into SERVEKIT_API_KEY, "
        "or name the variable that has it with --api-key"
    )


def _send_request(
    target: Target, method: str, path: str, body: bytes | None, timeout_s: float
) -> tuple[int, bytes]:
    headers = {"content-type": "application/json"} if body is not None else {}
    if target.key:
        headers["authorization"] = f"Bearer {target.key}"
    connection = _open_connection(target, timeout_s)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except ssl.SSLCertVerificationError as error:
        raise StartError(
            f"{target.url}: its certificate is not trusted ({error.verify_message}): name its "
            "authority with --ca, or use --insecure"
        ) from None
    except TimeoutError:
        raise StartError(f"{target.url} does not answer within {timeout_s:g} s") from None
    except (socket.gaierror, UnicodeError):  # UnicodeError: an invalid name
        raise StartError(f"{target.url}: no host is called {target.host!r}") from None
    except http.client.HTTPException as error:
        raise StartError(f"{target.url} does not speak HTTP: {error!r}") from None
    except OSError as error:
        raise StartError(f"nothing answers at {target.url}: {error.strerror or error}") from None
    finally:
        connection.close()


def _open_connection(target: Target, timeout_s: float) -> http.client.HTTPConnection:
    try:
        context = tls_context(target)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca {target.ca}: {error}") from None
    if context is None:
        return http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    return http.client.HTTPSConnection(target.host, target.port, timeout=timeout_s, context=context)
