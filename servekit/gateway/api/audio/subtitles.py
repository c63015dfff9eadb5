"""Transcripts as subtitles: SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.protocol.messages import SpokenSegment


def write_srt(segments: Sequence[SpokenSegment]) -> str:
    """Return the segments as numbered subtitles."""
    cues = [f"{at}\n{_write_cue(one, ',')}" for at, one in enumerate(segments, 1)]
    return "\n".join(cues)


def write_vtt(segments: Sequence[SpokenSegment]) -> str:
    """Return the segments as the cues of a WebVTT file."""
    return "\n".join(["WEBVTT\n", *(_write_cue(one, ".") for one in segments)])


def _write_cue(segment: SpokenSegment, point: str) -> str:
    # an arrow or an empty line would begin another cue
    text = " ".join(segment.text.split()).replace("-->", "->")
    start, end = _write_time(segment.start_s, point), _write_time(segment.end_s, point)
    return f"{start} --> {end}\n{text}\n"


def _write_time(seconds: float, point: str) -> str:
    whole, ms = divmod(max(0, round(seconds * 1000)), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{ms:03}"
