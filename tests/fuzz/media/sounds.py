"""Recordings that are damaged, that lie, or that ask for more than they are."""

from __future__ import annotations

import functools
import io
import random
import struct

import numpy as np
import soundfile

from tests.fuzz.media import damage
from tests.fuzz.media.damage import LIES

RATE = 16_000
#: Formats and codecs of libsndfile: those that are documented, and the others that it knows, but
#: SD2, whose other half it would write into the working directory.
READ = (
    ("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "ULAW"),
    ("WAV", "IMA_ADPCM"), ("WAV", "MS_ADPCM"), ("WAV", "GSM610"), ("WAVEX", "PCM_16"),
    ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
)  # fmt: skip
OTHERS = ("AIFF", "AU", "PAF", "SVX", "NIST", "VOC", "IRCAM", "W64", "MAT4", "MAT5", "PVF", "XI",
          "HTK", "SDS", "AVR", "CAF", "WVE", "MPC2K", "RF64")  # fmt: skip


def save(kind: str, codec: str | None = None, count: int = 4000, channels: int = 1) -> bytes:
    sound = np.random.default_rng(3).normal(0, 0.1, (count, channels)).clip(-1, 1)
    file = io.BytesIO()
    soundfile.write(file, sound, RATE, codec, format=kind)
    return file.getvalue()


@functools.cache
def honest() -> tuple[bytes, ...]:
    made = [save(kind, codec) for kind, codec in READ]
    return (*made, save("WAV", channels=2), save("FLAC", channels=8), save("OGG", channels=2))


@functools.cache
def foreign() -> tuple[bytes, ...]:
    """Files of formats beside those, as far as this libsndfile writes them."""
    made = []
    for kind in OTHERS:
        try:
            made.append(save(kind))
        except (soundfile.LibsndfileError, ValueError, TypeError):  # not into memory, or not at all
            continue
    return tuple(made)


# ---------------------------------------------------------------- lies


def wav(fmt: bytes, data: bytes, *chunks: bytes, size: int | None = None) -> bytes:
    body = b"WAVE" + b"".join(chunks) + b"fmt " + struct.pack("<I", len(fmt)) + fmt
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def lie(rng: random.Random) -> bytes:
    """A header that says what is not so."""
    one, two = rng.choice(LIES), rng.choice(LIES)
    data = rng.randbytes(rng.choice((0, 1, 100, 3000)))
    match rng.randrange(5):
        case 0:
            form = rng.choice((0, 1, 1, 1, 2, 3, 6, 7, 0x11, 0x31, 0x55, 0xFFFE, 0xFFFF))
            channels = rng.choice((0, 1, 2, 8, 64, 65, 65535))
            bits = rng.choice((0, 1, 8, 12, 16, 24, 32, 64, 65535))
            fields = (form, channels, one, two, rng.choice(LIES) & 0xFFFF, bits)
            size = rng.choice((None, one, two))
            return wav(struct.pack("<HHIIHH", *fields), data, size=size)
        case 1:  # STREAMINFO of a FLAC: sizes of blocks and frames, rate, channels, samples
            made = bytearray(save("FLAC"))
            at = rng.choice((4, 5, 8, 10, 12, 15, 18, 20, 21, 25))
            made[at : at + 4] = struct.pack(">I", one)
            return bytes(made)
        case 2:  # a page of an Ogg: place, stream, number, segments
            made = bytearray(save("OGG", rng.choice(("VORBIS", "OPUS"))))
            pages = [at for at in range(len(made) - 4) if made[at : at + 4] == b"OggS"]
            at = rng.choice(pages) + rng.choice((4, 5, 6, 14, 18, 22, 26))
            made[at : at + 4] = struct.pack("<I", one)
            return bytes(made)
        case 3:  # the tag before an MP3, whose size is said in sevenths of bytes
            long = bytes(rng.choice((0, 1, 0x7F, 0xFF)) for _ in range(4))
            return b"ID3\4\0" + bytes([rng.randrange(256)]) + long + data + save("MP3")
        case _:
            made = bytearray(rng.choice(foreign()))
            at = rng.randrange(min(80, len(made)))
            made[at : at + 4] = struct.pack(rng.choice(("<I", ">I")), one)
            return bytes(made)


# ---------------------------------------------------------------- bombs


@functools.cache
def bomb_silence(seconds: int, rate: int = RATE, channels: int = 1) -> bytes:
    """Silence: 14 bytes for each block of thousands of samples."""
    file = io.BytesIO()
    silence = np.zeros((rate, channels), np.int16)
    with soundfile.SoundFile(file, "w", rate, channels, format="FLAC") as writer:
        for _ in range(seconds):
            writer.write(silence)
    return file.getvalue()


@functools.cache
def bomb_chunks() -> bytes:
    fmt = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    return wav(fmt, b"\0" * 3200, b"LIST\0\0\0\0" * 200_000)


@functools.cache
def bomb_chain() -> bytes:
    """An Ogg of hundreds of streams, one after another."""
    return save("OGG", count=200) * 300


@functools.cache
def bomb_page() -> bytes:
    return b"OggS" * 200_000


@functools.cache
def not_numbers() -> bytes:
    values = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-45] * 300, "<f4")
    return wav(struct.pack("<HHIIHH", 3, 1, RATE, 4 * RATE, 4, 32), values.tobytes())


def bomb(rng: random.Random) -> bytes:
    """One of them. The largest, of a second and more each, are few."""
    if rng.random() < 0.05:
        return rng.choice((lambda: bomb_silence(7200), lambda: bomb_silence(20, 655_350, 8)))()
    makers = (
        *(bomb_chunks, bomb_chain, bomb_page, not_numbers),
        *(lambda: b"\xff\xfb\x90\x44" * 100_000, lambda: b"fLaC" + b"\4\0\0\0" * 100_000),
    )
    return rng.choice(makers)()


def make_sound(rng: random.Random, references: tuple[bytes, ...]) -> tuple[str, bytes]:
    """A recording, and what is wrong with it."""
    kind = damage.Kind(honest, foreign, lie, bomb, (0.42, 0.60, 0.64, 0.73, 0.79, 0.86, 0.94, 0.97))
    return damage.make_hostile(rng, kind, references)
