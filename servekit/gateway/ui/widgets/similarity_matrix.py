"""The similarities of vectors as a table, and the vectors as files to download."""

from __future__ import annotations

import array
import csv
import io
import json
from collections.abc import Sequence
from html import escape

import numpy

from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.answer_html import clean_text

#: The characters of a text that name it in the table.
NAME_CHARS = 28
Vector = Sequence[float]


def vector_of(raw: bytes) -> list[float]:
    """Return the numbers of a little-endian float32 vector."""
    return array.array("f", raw).tolist()


def compute_cosines(vectors: Sequence[Vector]) -> list[list[float]]:
    """Return the cosine similarity of each pair, -1 to 1; 0 for zero vectors."""
    if not vectors:
        return []
    rows = numpy.asarray(vectors, dtype=numpy.float64)
    lengths = numpy.linalg.norm(rows, axis=1, keepdims=True)
    unit = numpy.divide(rows, lengths, out=numpy.zeros_like(rows), where=lengths > 0)
    alike: list[list[float]] = numpy.clip(unit @ unit.T, -1.0, 1.0).tolist()
    return alike


def render_table(texts: Sequence[str], matrix: Sequence[Sequence[float]], say: Say) -> str:
    """Return the matrix as an HTML table: each cell has its number and a shade."""
    numbers = "".join(f'<th scope="col">{at + 1}</th>' for at in range(len(texts)))
    rows = "".join(
        f'<tr><th scope="row" title="{_shorten_name(text, 400)}">'
        f'<span class="sk-number">{at + 1}</span> '
        f"{_shorten_name(text, NAME_CHARS)}</th>{''.join(map(_render_cell, matrix[at]))}</tr>"
        for at, text in enumerate(texts)
    )
    caption, corner = escape(say("matrix.caption")), escape(say("matrix.text"))
    return (
        f'<div class="sk-scroll" tabindex="0" role="region" aria-label="{caption}">'
        f'<table class="sk-matrix"><caption>{caption}</caption>'
        f'<thead><tr><th scope="col">{corner}</th>{numbers}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _shorten_name(text: str, most: int) -> str:
    line = " ".join(clean_text(text).split())
    return escape(line if len(line) <= most else line[: most - 1] + "…")


def _render_cell(value: float) -> str:
    share = round(60 * max(0.0, value))
    return f'<td style="--sk-share:{share}%">{value:.3f}</td>'


# ---- files


def render_downloads(model: str, texts: Sequence[str], vectors: Sequence[Vector], say: Say) -> str:
    """Return buttons that save the vectors as JSON and as CSV; the page contains the files."""
    files = {
        "json": as_json(model, texts, vectors),
        "csv": as_csv(texts, vectors),
    }
    buttons = "".join(
        f'<button type="button" class="sk-save" data-name="embeddings.{kind}">'
        f"{escape(say('matrix.save', kind=kind.upper()))}</button>"
        f"<textarea hidden>{escape(text)}</textarea>"
        for kind, text in files.items()
    )
    return f'<div class="sk-actions sk-downloads">{buttons}</div>'


def as_json(model: str, texts: Sequence[str], vectors: Sequence[Vector]) -> str:
    """Return the vectors as JSON, with nine digits, the precision of float32."""
    data = [
        {"text": text, "embedding": [float(f"{value:.9g}") for value in vector]}
        for text, vector in zip(texts, vectors, strict=True)
    ]
    return json.dumps({"model": model, "data": data}, ensure_ascii=False)


def as_csv(texts: Sequence[str], vectors: Sequence[Vector]) -> str:
    """Return a row per text; a quote before the text keeps spreadsheets from running formulas."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["text", *range(len(vectors[0]) if vectors else 0)])
    for text, vector in zip(texts, vectors, strict=True):
        safe = f"'{text}" if text[:1] in tuple("=+-@\t\r") else text
        writer.writerow([safe, *(f"{value:.9g}" for value in vector)])
    return out.getvalue()
