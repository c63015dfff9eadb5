"""How many entries of a list a query asks for."""

from __future__ import annotations

import pytest

from servekit.errors import RequestError
from servekit.gateway.api.paging import query_parameters, read_limit


@pytest.mark.parametrize(
    ("query", "limit"),
    [({}, 20), ({"after": "x"}, 20), ({"limit": "1"}, 1), ({"limit": "0100"}, 100)],
)
def test_a_limit_is_taken_up_to_the_most(query: dict[str, str], limit: int) -> None:
    assert read_limit(query, default=20, most=100) == limit


@pytest.mark.parametrize("text", ["", "0", "101", "-1", "1.5", "ten", "²", "00001", " 1", "1\n"])
def test_another_limit_is_refused_by_name(text: str) -> None:
    with pytest.raises(RequestError, match="limit: expected a number of 1 to 100") as refused:
        read_limit({"limit": text}, default=20, most=100)
    assert refused.value.param == "limit"


def test_parameters_are_described_for_openapi() -> None:
    assert query_parameters(("limit", "The most", {"type": "integer"})) == [
        {"name": "limit", "in": "query", "description": "The most", "schema": {"type": "integer"}}
    ]
