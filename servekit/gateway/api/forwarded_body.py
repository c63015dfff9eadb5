"""The name of the model in the body of a forwarded request, JSON or a form.

The name is taken out, because the server has another one for the model. A body in which servers
could read another name than servekit is refused: keys are for certain models.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from servekit.errors import RequestError
from servekit.gateway.api.multipart import find_boundary, read_parts

_PARAM = "model"
_LONGEST_NAME = 1024


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A body without its model, and the position at which that stood."""

    body: bytes
    model: str = ""
    at: int | None = None
    is_json: bool = False


def find_model(content_type: bytes, body: bytes) -> FoundModel:
    """Return the body without its model. Raises RequestError if it cannot be read.

    Other bodies than JSON objects and forms name no model.
    """
    boundary = find_boundary(content_type)
    if boundary is not None:
        return _find_in_form(boundary, body)
    if body[:64].lstrip().startswith(b"{"):
        return _find_in_object(body)
    return FoundModel(body)


def _find_in_object(body: bytes) -> FoundModel:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        named = fields.pop(_PARAM, None)
        model = msgspec.json.decode(named, type=str) if named is not None else None
    except (msgspec.ValidationError, UnicodeDecodeError):
        raise RequestError("model: expected a string", param=_PARAM) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if any(name.casefold() == _PARAM for name in fields):
        raise RequestError("model: write its name in lower case", param=_PARAM)
    if model is None:
        return FoundModel(body)
    start, rest = b'{"model":', msgspec.json.encode(fields)
    return FoundModel(start + (b"," + rest[1:] if fields else rest[1:]), model, len(start), True)


def _find_in_form(boundary: bytes, body: bytes) -> FoundModel:
    named = [one for one in read_parts(boundary, body) if one.name.lower() == _PARAM.encode()]
    found = [one for one in named if one.end]  # not empty
    if not found:
        return FoundModel(body)
    if len(found) > 1:
        raise RequestError("model: the form has it more than once", param=_PARAM)
    _, start, end = found[0]
    try:
        model = body[start:end][:_LONGEST_NAME].decode()
    except UnicodeDecodeError:
        raise RequestError("model: its name is not UTF-8", param=_PARAM) from None
    return FoundModel(body[:start] + body[end:], model, start)
