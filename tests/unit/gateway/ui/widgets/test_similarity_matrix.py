"""Vectors: how alike, as a table and as files."""

from __future__ import annotations

import csv
import io
import json

import pytest

from servekit.errors import RequestError
from servekit.gateway.ui.pages.language import SAY_ENGLISH
from servekit.gateway.ui.widgets.similarity_matrix import (
    as_csv,
    as_json,
    compute_cosines,
    render_downloads,
    render_table,
    vector_of,
)


def test_cosines() -> None:
    alike = compute_cosines([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [0.0, 0.0]])
    assert alike[0] == pytest.approx([1, 0, 0.7071, 0], abs=1e-4)
    assert alike[3] == [0.0] * 4  # no direction
    assert compute_cosines([]) == []


def test_the_table_names_texts_and_escapes_them() -> None:
    texts = ["<script>x</script>", "a " * 100]
    made = render_table(texts, [[1.0, -0.25], [-0.25, 1.0]], SAY_ENGLISH)
    assert "<script" not in made
    assert made.count("<td") == 4
    assert "-0.250" in made
    assert '<th scope="row"' in made
    assert "…" in made


def test_files_hold_what_was_computed() -> None:
    vectors = [vector_of(b"\x00\x00\x80?\x00\x00\x00\xbf"), [0.1, 0.2]]
    told = json.loads(as_json("m", ['say "a"', "=1+1"], vectors))
    assert told["model"] == "m"
    assert told["data"][0] == {"text": 'say "a"', "embedding": [1.0, -0.5]}
    rows = list(csv.reader(io.StringIO(as_csv(['say "a"', "=1+1"], vectors))))
    assert rows[0] == ["text", "0", "1"]
    assert rows[1] == ['say "a"', "1", "-0.5"]
    assert rows[2][0] == "'=1+1"  # no spreadsheet computes it
    made = render_downloads("m", ["</textarea><script>"], [[1.0]], SAY_ENGLISH)
    assert made.count("</textarea>") == 2
    assert "<script" not in made


def test_texts_are_lines() -> None:
    from servekit.gateway.ui.pages.embeddings import texts_of

    assert texts_of(" a \n\n b\n") == ["a", "b"]
    for wrong in ("", "\n \n", "x\n" * 41):
        with pytest.raises(RequestError):
            texts_of(wrong)
