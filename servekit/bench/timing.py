"""The times of one request, computed from its record."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.bench.client.client_protocol import Record


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in seconds; None if not applicable."""

    e2e_s: float  # from its sending, or its due time, to its last byte
    ttft_s: float | None  # … to the first chunk with text
    itl_s: float | None  # mean gap between two chunks
    tpot_s: float | None  # mean time per token after the first

    @classmethod
    def from_record(cls, record: Record) -> Timing:
        e2e_s = record.ended - record.began
        if record.first is None or record.last is None:
            return cls(e2e_s, None, None, None)
        speaking_s = record.last - record.first
        tokens = tokens_of(record)
        return cls(
            e2e_s,
            record.first - record.began,
            speaking_s / (record.chunks - 1) if record.chunks > 1 else None,
            speaking_s / (tokens - 1) if tokens > 1 and record.chunks > 1 else None,
        )


def tokens_of(record: Record) -> int:
    """Return the output tokens as counted by the server; else one per chunk."""
    return record.chunks if record.output_tokens is None else record.output_tokens


def tokens_in_time(record: Record, end: float) -> float:
    """Return the number of output tokens before the measurement's end.

    Tokens of an unfinished stream count in proportion to its chunks in time; without streaming they
    all arrive at the end.
    """
    if record.ended <= end:
        return tokens_of(record)
    if not record.chunks:
        return 0.0
    return tokens_of(record) * record.chunks_in_time / record.chunks
