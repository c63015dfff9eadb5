"""Files of sound: what they hold, however they are packed, and lies in their headers."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.engines.media.recording import decode_recording
from servekit.engines.media.resampling import Resampler
from servekit.errors import RequestError, Unsupported
from tests.fuzz.media import sounds
from tests.unit.engines.hearing_model import RATE, make_samples, write_wav

SOUND = make_samples(2)
WAV = write_wav(SOUND)
HOUR_S = 3600.0


def read(file: bytes, max_s: float = HOUR_S) -> Any:
    return decode_recording(file, RATE, max_s)


def pack(form: str, subtype: str | None = None, rate: int = RATE, sound: Any = SOUND) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, subtype, format=form)
    return file.getvalue()


@pytest.mark.parametrize(
    ("subtype", "step"),
    [("PCM_U8", 2**-7), ("PCM_16", 2**-15), ("PCM_24", 2**-23), ("PCM_32", 2**-24),
     ("FLOAT", 0), ("DOUBLE", 0)],
)  # fmt: skip
@pytest.mark.parametrize("form", ["WAV", "WAVEX"])
def test_wav_is_read_without_a_library(
    form: str, subtype: str, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pack(form, subtype)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    heard = read(file)
    assert heard.dtype == np.float32 and len(heard) == len(SOUND)
    assert np.abs(heard - SOUND).max() <= 2 * step


def test_16_bits_are_what_the_library_alone_would_hear() -> None:
    assert (read(WAV) == np.frombuffer(WAV[44:], "<i2") / 32768).all()


@pytest.mark.parametrize(
    ("form", "subtype", "worst"),
    [("FLAC", None, 1e-4), ("OGG", "VORBIS", 0.4), ("OGG", "OPUS", 0.5), ("MP3", None, 0.5),
     ("WAV", "ULAW", 0.1), ("WAV", "IMA_ADPCM", 0.6), ("AIFF", "PCM_16", 1e-4)],
)  # fmt: skip
def test_other_formats_need_a_library(form: str, subtype: str | None, worst: float) -> None:
    tone = np.sin(np.arange(2 * RATE) * 2 * np.pi * 300 / RATE).astype(np.float32) / 2
    heard = read(pack(form, subtype, sound=tone))
    assert abs(len(heard) - len(tone)) <= 2400
    middle = slice(RATE // 2, RATE)
    share = np.abs(np.fft.rfft(heard[middle] * np.hanning(RATE // 2)))
    assert share.argmax() == 150, "the tone has 300 Hz"


def test_without_the_library_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(Unsupported, match="engine: pip install soundfile"):
        read(pack("FLAC"))


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000])
@pytest.mark.parametrize("channels", [1, 2, 7])
def test_any_rate_and_channels_become_one(rate: int, channels: int) -> None:
    tone = np.sin(np.arange(2 * rate) * 2 * np.pi * 440 / rate).astype(np.float32) / 2
    file = write_wav(np.repeat(tone[:, None], channels, 1), rate)
    due = np.sin(np.arange(2 * RATE) * 2 * np.pi * 440 / RATE) / 2
    heard = read(file)
    assert abs(len(heard) - len(due)) <= 2
    inner = slice(200, len(due) - 200)
    # 44,101 Hz is read as 44,100: in two seconds the tone comes 45 µs late
    assert np.abs(heard[inner] - due[inner]).max() < (0.08 if rate == 44_101 else 1e-3)


def test_channels_are_mixed() -> None:
    both = np.stack([SOUND, -SOUND], 1)
    assert np.abs(read(write_wav(both))).max() < 1e-4


def test_what_is_too_high_is_filtered() -> None:
    high = np.sin(np.arange(96_000) * 2 * np.pi * 10_000 / 48_000).astype(np.float32)
    assert np.abs(read(write_wav(high, 48_000))[200:-200]).max() < 1e-3


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([8000, 22_050, 44_100, 48_000]),
    st.lists(st.integers(0, 700), min_size=1, max_size=12),
)
def test_blocks_of_any_size_give_the_same(rate: int, sizes: list[int]) -> None:
    sound = make_samples(sum(sizes) / rate + 0.01, rate=rate)[: sum(sizes)]
    whole = Resampler(rate, RATE)
    due = np.concatenate([whole.take_samples(sound), whole.end()])
    parted, parts, at = Resampler(rate, RATE), [], 0
    for size in sizes:
        parts.append(parted.take_samples(sound[at : at + size]))
        at += size
    made = np.concatenate([*parts, parted.end()])
    assert len(made) == len(due) == -(-len(sound) * RATE // rate)
    assert np.allclose(made, due, atol=1e-6)


def header(**changed: int) -> bytes:
    """A WAV file with these fields in its header."""
    known = {"form": 1, "channels": 1, "rate": RATE, "bits": 16, "size": 2 * len(SOUND)} | changed
    head = struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", 2**31 - 1, b"WAVEfmt ", 16, known["form"], known["channels"],
        known["rate"], 0, 0, known["bits"], b"data", known["size"],
    )  # fmt: skip
    return head + WAV[44:]


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0xFFFFFFFF])
def test_a_writer_to_a_pipe_does_not_know_the_size(size: int) -> None:
    assert len(read(header(size=size))) == len(SOUND)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "cannot be read as audio"),
    "text": (b"I am no sound.\n" * 100, "WAV, FLAC, Ogg and MP3 are read"),
    "zeros": (bytes(100_000), "cannot be read as audio"),
    "half a header": (WAV[:30], "cannot be read as audio"),
    "no samples": (WAV[:44], "cut short"),
    "empty": (write_wav(SOUND[:0]), "is empty"),
    "cut wav": (WAV[:-1000], "cut short"),
    "cut flac": (pack("FLAC")[:-1000], "file: "),
    "a huge size": (header(size=2**32 - 100), "cut short"),
    "no channels": (header(channels=0), "says 0 channels"),
    "65535 channels": (header(channels=65535), "says 65535 channels"),
    "no rate": (header(rate=0), "says 0 samples a second"),
    "a huge rate": (header(rate=2**32 - 1), "says 4294967295 samples a second"),
    "odd bits": (header(bits=40), "file: "),
    "an unknown codec": (header(form=0x1234), "file: "),
    "no format": (b"RIFF\0\0\0\0WAVEdata\x10\0\0\0" + bytes(16), "come before their format"),
    "no data": (b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0" + bytes(16), "without samples"),
    "a chunk beyond the end": (b"RIFF\0\0\0\0WAVELIST\xff\xff\xff\xff", "without samples"),
    "not numbers": (pack("WAV", "FLOAT", sound=np.full(100, np.nan, np.float32)), "NaN"),
    "infinite": (pack("WAV", "FLOAT", sound=np.full(100, np.inf, np.float32)), "NaN"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str) -> None:
    file, words = HOSTILE[name]
    with pytest.raises(RequestError, match=words) as refused:
        read(file)
    assert (refused.value.param, refused.value.status) == ("file", 400)


def test_loud_samples_are_clipped() -> None:
    assert np.abs(read(pack("WAV", "FLOAT", sound=SOUND * 1e30))).max() == 1


def test_a_bomb_takes_no_more_memory_than_the_longest_recording() -> None:
    silence = np.zeros(RATE * 60, np.int16)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", RATE, 1, format="FLAC") as writer:
        for _ in range(120):  # two hours
            writer.write(silence)
    assert len(file.getvalue()) < 2**20
    tracemalloc.start()
    with pytest.raises(RequestError, match="longer than 60 s"):
        read(file.getvalue(), 60)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * 2**20


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["WAV", "FLAC", "OGG", "MP3"]), st.data())
def test_damaged_files_are_heard_or_refused(form: str, data: st.DataObject) -> None:
    file = bytearray(DAMAGED[form])
    for at in data.draw(st.lists(st.integers(0, len(file) - 1), max_size=8)):
        file[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(file)))
    try:
        heard = read(bytes(file[:cut]), 60)
    except RequestError as error:
        assert error.status == 400
    else:
        assert np.isfinite(heard).all() and np.abs(heard).max() <= 1.5


DAMAGED = {form: pack(form, sound=SOUND[:4000]) for form in ("WAV", "FLAC", "OGG", "MP3")}


def test_silence_of_many_channels_is_not_decoded_to_its_end() -> None:
    """A second of eight channels of 655 kHz takes four kilobytes, and fifty milliseconds."""
    with pytest.raises(RequestError, match="8 channels of 655350 samples a second, too many") as no:
        read(sounds.bomb_silence(2, 655_350, 8), 10)
    assert (no.value.status, no.value.param) == (400, "file")


@pytest.mark.parametrize("form", ["SDS", "VOC", "PAF", "W64", "MAT5"])
def test_formats_of_old_programs_are_refused(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    """libsndfile prints what it finds in some of them."""
    for file in (pack(form, sound=SOUND[:4000]), b"ID3\4\0\0\0\0\0\2\0\0" + pack(form)):
        with pytest.raises(RequestError, match="WAV, FLAC, Ogg and MP3 are read"):
            read(file)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("form", ["MP3", "FLAC"])
def test_tags_before_a_recording_are_left_out(form: str) -> None:
    file = pack(form)
    due = read(file)
    tag = b"ID3\4\0\0\0\0\1\0" + bytes(128)
    for tags in (tag, tag * 3):
        assert (read(tags + file) == due).all()


def test_no_other_half_of_a_recording_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libsndfile takes an MP3 for something else if a file `._` is in the working directory."""
    due = read(pack("MP3"))
    (tmp_path / "._").write_bytes(bytes(range(256)) * 20)
    monkeypatch.chdir(tmp_path)
    assert (read(pack("MP3")) == due).all()


def test_a_header_that_leads_to_before_the_file_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    file = pack("AIFF", sound=SOUND[:4000])
    at = file.index(b"SSND") + 2
    with pytest.raises(RequestError, match="cannot be read as audio"):
        read(file[:at] + b"\0\0\0\x80" + file[at + 4 :])
    assert not raised
