"""The OpenAPI operation of an endpoint that bypasses FastAPI, besides its types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from servekit.gateway.api.openai.response_types import OpenAIError

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
JSON = "application/json"
FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Operation:
    """A POST endpoint. The types that it decodes and encodes give the schemas."""

    path: str
    summary: str
    request: type[Struct]
    response: Any  # a struct, or a string for plain text
    pieces: tuple[type, ...] = ()  # the types of a stream's events, or of its lines
    tag: str = "OpenAI"
    stream: str = EVENTS  # the content type of the pieces
    error: type[Struct] = OpenAIError
    body: str = JSON  # the content type of the request
    texts: bool = False  # the answer may be plain text, too

    @property
    def plain(self) -> bool:
        """Return whether the answer is plain text."""
        return not (isinstance(self.response, type) and issubclass(self.response, Struct))
