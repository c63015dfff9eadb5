"""The query of lists that are read page by page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from servekit.errors import RequestError

Json = dict[str, Any]


def query_parameters(*told: tuple[str, str, Json]) -> list[Json]:
    """Return OpenAPI's description of parameters: the name, the text and the schema of each."""
    return [
        {"name": name, "in": "query", "description": description, "schema": schema}
        for name, description, schema in told
    ]


def read_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """Return the number of entries that `limit` asks for. Raises RequestError."""
    if (text := query.get("limit")) is None:
        return default
    if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= most:
        raise RequestError(f"limit: expected a number of 1 to {most}", param="limit")
    return int(text)
