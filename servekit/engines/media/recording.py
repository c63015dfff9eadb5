"""Recordings: the bytes of a file as one channel of samples, at the rate that a model hears.

WAV is read here; FLAC, Ogg, MP3 and the rarer codecs of WAV by libsndfile, if the package soundfile
is installed. A file is decoded block by block, mixed to one channel and resampled at once, so that
no header can make it take more memory than the longest recording that is allowed.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servekit.engines.media.resampling import Resampler
from servekit.errors import RequestError, Unsupported, describe_error

Samples = NDArray[np.float32]

#: As `TransformersOptions.max_audio_s` is by default.
MAX_AUDIO_S = 1800.0
#: Bounds of what a header may say.
MAX_CHANNELS = 64
MIN_RATE, MAX_RATE = 1000, 768_000
#: Most numbers of all channels for each second that a recording may be long: two channels of
#: 192 kHz, eight of 48. Silence at a higher rate takes few bytes and minutes of decoding.
MAX_NUMBERS_PER_S = 384_000
#: Numbers that are decoded at once, of all channels together.
BLOCK = 2**18
#: Sizes in the headers of WAV files whose writer did not know the size, as it wrote to a pipe.
_UNKNOWN_SIZES = (0, 0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF)
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
#: By format and bits: the type of a sample, and its greatest value.
_TYPES: dict[tuple[int, int], tuple[str, float]] = {
    (_PCM, 8): ("u1", 2.0**7),
    (_PCM, 16): ("<i2", 2.0**15),
    (_PCM, 24): ("u1", 2.0**31),  # three bytes, read as the upper ones of four
    (_PCM, 32): ("<i4", 2.0**31),
    (_FLOAT, 32): ("<f4", 1.0),
    (_FLOAT, 64): ("<f8", 1.0),
}
#: What files begin with that libsndfile is given: the first four bytes, and those after a size. It
#: knows older formats, too, some of which print what they read, or open other files.
_SIGNATURES = (b"RIFFWAVE", b"FORMAIFF", b"FORMAIFC")
#: A tag before an MP3, of no content.
_EMPTY_TAG = b"ID3\4\0\0\0\0\0\n" + bytes(10)
_READ = "WAV, FLAC, Ogg and MP3 are read"
_CUT_SHORT = "file: the recording is cut short: its header promises more than there is; send all"


@dataclass(frozen=True)
class Header:
    """The facts about the samples that a file says."""

    rate: int
    channels: int


def decode_recording(file: bytes, rate: int, max_s: float) -> Samples:
    """Return the samples of a recording, from -1 to 1. Raises RequestError."""
    try:
        header, blocks = _open_wav(file) or _open_by_library(file)
        _check_header(header)
        return _join_blocks(header, blocks, rate, max_s)
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # of damaged data a decoder may raise anything
        raise _unreadable(describe_error(error)) from error


def _join_blocks(
    header: Header, blocks: Iterator[NDArray[Any]], rate: int, max_s: float
) -> Samples:
    resampler = Resampler(header.rate, rate)
    parts: list[Samples] = []
    left = int(max_s * header.rate)
    numbers = int(max_s * MAX_NUMBERS_PER_S)
    for block in blocks:  # [samples, channels]
        left -= len(block)
        numbers -= block.size
        if numbers < 0:
            raise RequestError(
                f"file: the recording has {header.channels} channels of {header.rate} samples a"
                " second, too many to decode for so long; send one channel of 16 kHz",
                param="file",
            )
        if left < 0:
            raise RequestError(
                f"file: the recording is longer than {max_s:g} s; send it in parts, or raise"
                " the model's option max_audio_s",
                param="file",
            )
        mixed = block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mixed).all():
            raise RequestError(
                "file: the recording has samples that are not numbers (NaN)", param="file"
            )
        parts.append(resampler.take_samples(mixed.clip(-1, 1)))
    parts.append(resampler.end())
    samples = np.concatenate(parts)
    if not len(samples):
        raise RequestError("file: the recording is empty", param="file")
    return samples


def _check_header(header: Header) -> None:
    if not MIN_RATE <= header.rate <= MAX_RATE:
        raise _unreadable(f"its header says {header.rate} samples a second")
    if not 1 <= header.channels <= MAX_CHANNELS:
        raise _unreadable(f"its header says {header.channels} channels")


def _unreadable(why: str) -> RequestError:
    return RequestError(f"file: it cannot be read as audio: {why}", param="file")


# ---------------------------------------------------------------- WAV


def _open_wav(file: bytes) -> tuple[Header, Iterator[NDArray[Any]]] | None:
    """Open a WAV file of plain samples; return None for any other file."""
    if file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        return None
    form, header, bits, at = 0, None, 0, 12
    while at + 8 <= len(file):
        name, size = struct.unpack_from("<4sI", file, at)
        at += 8
        if name == b"fmt " and size >= 16:
            form, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", file, at)
            if form == _EXTENSIBLE and size >= 40:
                (form,) = struct.unpack_from("<H", file, at + 24)
            header = Header(rate, channels)
        elif name == b"data":
            if header is None:
                raise _unreadable("its samples come before their format")
            if (form, bits) not in _TYPES:
                return None
            _check_header(header)
            size = _count_bytes(size, len(file) - at)
            return header, _read_blocks(file, at, at + size, header, form, bits)
        at += size + size % 2
    raise _unreadable("it is a WAV file without samples")


def _count_bytes(stated: int, there: int) -> int:
    if stated in _UNKNOWN_SIZES:
        return min(stated, there) or there
    if stated > there:
        raise RequestError(_CUT_SHORT, param="file")
    return stated


def _read_blocks(
    file: bytes, at: int, end: int, header: Header, form: int, bits: int
) -> Iterator[NDArray[Any]]:
    kind, greatest = _TYPES[form, bits]
    width = header.channels * bits // 8
    step = max(1, BLOCK // header.channels) * width
    for start in range(at, end - width + 1, step):
        count = (min(start + step, end) - start) // width * header.channels
        values = np.frombuffer(file, kind, count * (3 if bits == 24 else 1), start)
        if bits == 24:
            wide = np.zeros((count, 4), np.uint8)
            wide[:, 1:] = values.reshape(count, 3)
            values = wide.view("<i4").ravel()
        elif bits == 8:
            values = values.astype(np.float32) - greatest
        with np.errstate(invalid="ignore"):  # of what is no number, which is refused later
            scaled = values.astype(np.float32) / np.float32(greatest)
        yield scaled.reshape(-1, header.channels)


# ---------------------------------------------------------------- other files


def _open_by_library(file: bytes) -> tuple[Header, Iterator[NDArray[Any]]]:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the package is there, and libsndfile is not
        raise Unsupported(
            "file: only WAV is read here; other formats need the package soundfile in the"
            " environment of the model's engine: pip install soundfile",
            param="file",
        ) from None
    try:
        opened = soundfile.SoundFile(_File(_check_signature(file)))
    except soundfile.LibsndfileError:
        raise _unreadable(_READ) from None
    return Header(opened.samplerate, opened.channels), _read_by_library(opened)


class _File(io.BytesIO):
    """A file for libsndfile, which seeks to before its begin if a header lies.

    soundfile would print the traceback of an error, as it is raised within C code.
    """

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()


def _check_signature(file: bytes) -> bytes:
    """Return a file without its tags, as libsndfile gets it.

    Raises RequestError for a format that is not read. Without a tag before its first frame,
    libsndfile takes an MP3 for the half of a file of Sound Designer, and looks for the other half,
    `._`, in the working directory.
    """
    at = 0
    while file[at : at + 3] == b"ID3" and len(file) >= at + 10:
        size = 0
        for byte in file[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size
    head = file[at : at + 12]
    if _begins_frame(head):
        return _EMPTY_TAG + file[at:]
    if head[:4] in (b"fLaC", b"OggS") or head[:4] + head[8:] in _SIGNATURES:
        return file[at:]
    raise _unreadable(_READ)


def _begins_frame(head: bytes) -> bool:
    """Return whether this is the header of a frame of MPEG audio, without a reserved value."""
    if len(head) < 4 or head[0] != 0xFF or head[1] < 0xE0:
        return False
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    return version != 1 and layer != 0 and head[2] >> 4 not in (0, 15) and head[2] >> 2 & 3 != 3


def _read_by_library(opened: Any) -> Iterator[NDArray[Any]]:
    with opened:
        stated, count = opened.frames, 0
        while len(block := opened.read(max(1, BLOCK // opened.channels), "float32", True)):
            count += len(block)
            yield block
        if count < stated < 2**48:
            raise RequestError(_CUT_SHORT, param="file")
