"""Outputs of requests under way: embeddings that are no numbers."""

from __future__ import annotations

from array import array

import pytest

from servekit.engines.api.job_state import find_common_length, make_embedding_output

GOOD = array("f", [0.5, -1.0, 2.0]).tobytes()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_vector_with_nan_fails_its_request(at: int) -> None:
    numbers = array("f", [0.5, -1.0, 2.0])
    numbers[at] = float("nan")
    output = make_embedding_output(7, [GOOD, numbers.tobytes()])
    assert output.id == 7
    assert output.error and "NaN" in output.error
    assert output.vectors is None


def test_vectors_of_numbers_are_told() -> None:
    output = make_embedding_output(7, [GOOD, array("f", [3e38, 3e38]).tobytes()])
    assert (output.error, output.finish) == (None, "stop")
    assert output.vectors is not None and output.vectors[0] == GOOD


def test_common_beginnings() -> None:
    assert find_common_length([], [1]) == 0
    assert find_common_length([1, 2], [1, 2, 3]) == 2
    assert find_common_length([1, 2, 3], [1, 9, 3]) == 1
    assert find_common_length([5], [6]) == 0
