"""The client of a streamed chat answer: server-sent events of any OpenAI-compatible server, as
text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from servekit.errors import ServekitError, StartError
from servekit.sse import EventStream, EventTooLong

if TYPE_CHECKING:
    import httpx

#: Maximum length of an event of the stream.
_LONGEST_BYTES = 4 * 2**20
#: Maximum bytes read of an error page.
_MOST_ERROR_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class ChatParameters:
    """The parameters of a request, without the conversation."""

    model: str
    parameters: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)  # of the last answer, as the server says


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer. `thought`: it belongs to the model's reasoning."""

    text: str
    thought: bool = False


def stream_answer(
    client: httpx.Client, asked: ChatParameters, messages: list[dict[str, str]]
) -> Iterator[AnswerPart]:
    """Yield the answer as it arrives. Closing this early disconnects, which stops the model.

    Raises StartError if the connection fails, ServekitError for other errors.
    """
    import httpx

    body = {**asked.parameters, "model": asked.model, "messages": messages, "stream": True}
    asked.usage.clear()
    try:
        with client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise ServekitError(_describe_refusal(response))
            yield from _read_pieces(response, asked.usage)
    except httpx.ConnectError as error:
        raise _explain_connection(client, error) from None
    except httpx.TimeoutException:
        raise ServekitError(f"{client.base_url} does not answer in time") from None
    except httpx.HTTPError as error:
        raise ServekitError(f"the answer broke off: {error or type(error).__name__}") from None


def _explain_connection(client: httpx.Client, error: httpx.ConnectError) -> StartError:
    found = re.search(r"certificate verify failed: (.*?)(?: \(_ssl|$)", str(error))
    if found is None:
        return StartError(f"nothing answers at {client.base_url}: {error}")
    return StartError(
        f"{client.base_url}: its certificate is not trusted ({found.group(1)}): name its authority"
        " with --ca, or use --insecure"
    )


def list_models(client: httpx.Client) -> list[str]:
    """Return the names of the server's models. Raises as `stream_answer` does."""
    import httpx

    try:
        response = client.get("models")
        if response.status_code != httpx.codes.OK:
            raise ServekitError(_describe_refusal(response))
        found = response.json()["data"]
        return [str(one["id"]) for one in found]
    except httpx.ConnectError as error:
        raise _explain_connection(client, error) from None
    except httpx.HTTPError as error:
        raise ServekitError(f"{client.base_url}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise ServekitError(f"{client.base_url} does not list its models; name one") from None


def _read_pieces(response: httpx.Response, usage: dict[str, int]) -> Iterator[AnswerPart]:
    for data in _read_events(response.iter_bytes()):
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ServekitError(
                "the server's answer is not JSON; does it have OpenAI's API?"
            ) from None
        if isinstance(event, dict):
            if isinstance(told := event.get("usage"), dict):
                usage.update({k: v for k, v in told.items() if isinstance(v, int)})
            yield from _of_event(event)


def _of_event(event: dict[str, Any]) -> Iterator[AnswerPart]:
    if event.get("error"):
        raise ServekitError(_error_message(event) or "the server reports an error")
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    delta = first.get("delta") if isinstance(first, dict) else None
    for key in ("reasoning_content", "content") if isinstance(delta, dict) else ():
        assert isinstance(delta, dict)
        if isinstance(text := delta.get(key), str) and text:
            yield AnswerPart(text, thought=key != "content")


def _read_events(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the data of each event."""
    events = EventStream(_LONGEST_BYTES)
    try:
        for chunk in chunks:
            yield from events.read_events(chunk)
        yield from events.end()
    except EventTooLong:
        said = f"the server sent an event of more than {_LONGEST_BYTES} bytes"
        raise ServekitError(said) from None


_KEY_HINT = "(here: put it into SERVEKIT_API_KEY, or name its variable with --api-key)"


def _describe_refusal(response: httpx.Response) -> str:
    """Describe why a request was refused, in the server's words."""
    text = b""
    for chunk in response.iter_bytes():
        text += chunk
        if len(text) > _MOST_ERROR_BYTES:
            break
    said = ""
    with contextlib.suppress(ValueError, RecursionError):
        said = _error_message(json.loads(text))
    said = said or f"without a reason but {response.reason_phrase!r}"
    hint = "" if response.status_code != 401 else f" {_KEY_HINT}"
    return f"refused ({response.status_code}): {said}{hint}"


def _error_message(body: Any) -> str:
    """Return the message of an error in the envelope of OpenAI's API, or a similar one."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
