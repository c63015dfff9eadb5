"""Transcripts as SubRip and WebVTT."""

from __future__ import annotations

import pytest

from servekit.gateway.api.audio.subtitles import write_srt, write_vtt
from servekit.protocol.messages import SpokenSegment

SPOKEN = [
    SpokenSegment(" Hello  there.\n", 0.0, 1.5),
    SpokenSegment("a --> b\n\nc", 1.5, 3661.0005),
]


def test_subrip_numbers_its_cues_and_has_a_comma_before_the_milliseconds() -> None:
    assert write_srt(SPOKEN) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n"
        "2\n00:00:01,500 --> 01:01:01,000\na -> b c\n"
    )
    assert write_srt([]) == ""


def test_webvtt_has_a_head_and_a_point_before_the_milliseconds() -> None:
    assert write_vtt(SPOKEN) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there.\n\n"
        "00:00:01.500 --> 01:01:01.000\na -> b c\n"
    )
    assert write_vtt([]) == "WEBVTT\n"


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (-0.5, "00:00:00,000"),
        (0.0004, "00:00:00,000"),
        (0.9996, "00:00:01,000"),
        (59.999, "00:00:59,999"),
        (60.0, "00:01:00,000"),
        (3600.0, "01:00:00,000"),
        (359_999.5, "99:59:59,500"),
        (360_000.0, "100:00:00,000"),
    ],
)
def test_a_time_has_hours_minutes_and_seconds(seconds: float, written: str) -> None:
    [_, times, _] = write_srt([SpokenSegment("x", seconds, 0.0)]).splitlines()
    assert times.partition(" --> ")[0] == written
