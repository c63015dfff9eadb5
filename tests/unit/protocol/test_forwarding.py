"""Which endpoints are forwarded to a model's own server."""

from __future__ import annotations

import pytest

from servekit.protocol.forwarding import find_pattern


@pytest.mark.parametrize(
    ("path", "patterns", "found"),
    [
        ("/v1/rerank", ["/v1/rerank"], "/v1/rerank"),
        ("/v1/rerank/x", ["/v1/rerank"], ""),
        ("/v1/rerank", ["/v1/rerank/x"], ""),
        ("/v1/rerank", ["/v1/*"], "/v1/*"),
        ("/v1/audio/speech", ["/v1/*"], "/v1/*"),
        ("/v1", ["/v1/*"], ""),
        ("/v10/x", ["/v1/*"], ""),
        ("/v1/rerank", ["/v1*"], ""),
        ("/v1/a", ["/v1/b", "/v1/*", "/*"], "/v1/*"),
        ("/v1/a", [], ""),
    ],
)
def test_the_first_pattern_that_covers_a_path_counts(
    path: str, patterns: list[str], found: str
) -> None:
    assert find_pattern(path, patterns) == found
