"""The JSON of a result: its schema, its names, and that what is written is what was found."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import pytest

from servekit.bench.output.result import VERSION, Result, Run, Spread, result_schema
from tests.unit.bench.results import result

#: Programs rely on these: taking one away, or changing what it means, takes a new version.
RUN = (
    "concurrency rate duration_s interrupted completed failed unfinished requests_per_s "
    "output_tokens_per_s prompt_tokens_per_s tokens_by prompt_tokens output_tokens ttft_s itl_s "
    "tpot_s e2e_s goodput errors client timeline"
)


@pytest.mark.parametrize("loads", [0, 1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_result_is_as_its_schema_says(loads: int, stream: bool) -> None:
    found = result(loads, stream=stream)
    written = msgspec.json.encode(found)
    jsonschema.validate(json.loads(written), result_schema())
    assert msgspec.json.decode(written, type=Result) == found


def test_names_stay() -> None:
    assert VERSION == 1
    assert Run.__struct_fields__ == tuple(RUN.split())
    assert Spread.__struct_fields__ == ("count", "mean", "p50", "p90", "p99", "max", "percentiles")
    assert Result.__struct_fields__ == ("version", "servekit", "began_at", "url", "asked", "runs")


def test_a_spread_is_of_one_piece() -> None:
    found = result().runs[1].e2e_s
    assert found is not None
    assert len(found.percentiles) == 101
    assert (found.p50, found.p90, found.max) == (
        found.percentiles[50],
        found.percentiles[90],
        found.percentiles[100],
    )
    assert found.percentiles == sorted(found.percentiles)
