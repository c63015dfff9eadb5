"""Counts of tokens: of the completion and the whole context, in places that come and go."""

from __future__ import annotations

import gc

import torch

from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.token_history import TokenHistories
from tests.unit.engines.transformers.test_request_row import make

LOGITS = torch.zeros(1, 6)


def penalised(prompt: list[int], completion: list[int]) -> Row:
    row = make(prompt, sampling=Sampling(0.0, repetition_penalty=1.1))
    row.completion = completion
    return row


def read(histories: TokenHistories, *rows: Row) -> list[tuple[list[float], list[int]]]:
    counts, seen, places = histories.count_tokens(rows, LOGITS)
    return [
        (counts[place].tolist(), seen[place].nonzero().flatten().tolist())
        for place in places.tolist()
    ]


def test_counts_are_of_the_completion_and_what_was_seen_of_all() -> None:
    histories, row = TokenHistories(), penalised([1, 2, 99], [2, 4])
    expected = [([0, 0, 1, 0, 1, 0], [1, 2, 4])]
    assert read(histories, row) == expected, "99 can only be read"
    row.completion += [4, 4]
    for _ in range(2):
        assert read(histories, row) == [([0, 0, 1, 0, 3, 0], [1, 2, 4])]
    other = TokenHistories()
    assert read(other, row) == [([0, 0, 1, 0, 3, 0], [1, 2, 4])], (
        "another sampler's, from the start"
    )
    assert read(histories, row) == [([0, 0, 1, 0, 3, 0], [1, 2, 4])]


def test_places_are_used_again_and_freed_with_the_last() -> None:
    histories = TokenHistories()
    rows = [penalised([n % 6], [(n + 1) % 6] * n) for n in range(20)]
    for turn in range(3):
        for row in rows:
            row.completion.append(turn)
        found = read(histories, *reversed(rows))
        for row, (counts, seen) in zip(reversed(rows), found, strict=True):
            assert counts == [row.completion.count(token) for token in range(6)]
            assert seen == sorted({*row.job.prompt_ids, *row.completion})
        rows = [*rows[::2], penalised([5], [turn])]
    assert histories._counts is not None and len(histories._counts) == 32
    del row
    rows.clear()
    gc.collect()
    assert histories._counts is None and not histories._taken
