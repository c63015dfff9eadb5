"""Arguments of calls for APIs that have them as an object."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.gateway.api.tool_arguments import arguments_of


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": [1, null]}', {"a": [1, None]}),
        # what is no object is handed on as it is, under a name that says so
        ('{"a"', {"INVALID_JSON": '{"a"'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("null", {"INVALID_JSON": "null"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ("[" * 5000, {"INVALID_JSON": "[" * 5000}),
    ],
)
def test_arguments_are_an_object_whatever_the_model_wrote(
    text: str, arguments: dict[str, Any]
) -> None:
    assert arguments_of(text) == arguments
