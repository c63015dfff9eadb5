"""What is done to a file of any format: cut, flipped, joined to another; and files of no format."""

from __future__ import annotations

import io
import random
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Numbers that a length, a width or a rate becomes.
LIES = (
    0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 1000, 4096, 32767, 32768, 65535, 65536, 8_000_000,
    2**24 - 1, 2**27, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1,
)  # fmt: skip


def cut(rng: random.Random, file: bytes) -> bytes:
    return file[: rng.randrange(len(file) + 1)]


def flip(rng: random.Random, file: bytes) -> bytes:
    """Flip bits, mostly of the header."""
    made = bytearray(file)
    end = len(made) if rng.random() < 0.5 else min(len(made), 64)
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        made[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(made)


def overwrite(rng: random.Random, file: bytes) -> bytes:
    """Put a number that lies anywhere, in either order of bytes."""
    size = rng.choice((1, 2, 4, 8))
    number = rng.choice(LIES) & (1 << 8 * size) - 1
    at = rng.randrange(len(file)) if rng.random() < 0.6 else rng.randrange(min(64, len(file)))
    return file[:at] + number.to_bytes(size, rng.choice(("little", "big"))) + file[at + size :]


def insert(rng: random.Random, file: bytes) -> bytes:
    at = rng.randrange(len(file))
    some = rng.choice((rng.randbytes(rng.choice((1, 9, 300))), b"\0" * 4000, b"\xff" * 4000))
    return file[:at] + some + file[at:]


def drop(rng: random.Random, file: bytes) -> bytes:
    at = rng.randrange(len(file))
    return file[:at] + file[at + rng.choice((1, 4, 100)) :]


def repeat(rng: random.Random, file: bytes) -> bytes:
    """Say a part of it again and again."""
    at = rng.randrange(len(file))
    part = file[at : at + rng.choice((4, 12, 50, 400))]
    return file[:at] + part * rng.choice((2, 30, 1000)) + file[at:]


def splice(rng: random.Random, file: bytes, other: bytes) -> bytes:
    """The begin of one with the end of another."""
    return file[: rng.randrange(len(file))] + other[rng.randrange(len(other)) :]


def relabel(rng: random.Random, file: bytes, other: bytes) -> bytes:
    """The signature of one on the content of another."""
    size = rng.choice((4, 12, 16, 33))
    return file[:size] + other[size:]


DAMAGES = (cut, cut, flip, flip, flip, overwrite, overwrite, overwrite, insert, drop, repeat)


def damage(rng: random.Random, file: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        file = rng.choice(DAMAGES)(rng, file) if file else b""
    return file


def archive(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("../../x.png", content)
    return file.getvalue()


def polyglot(rng: random.Random, file: bytes, references: tuple[bytes, ...]) -> bytes:
    """A file that is also another."""
    others = (archive(file), b"%PDF-1.4\n1 0 obj\n", b"=1;alert(1)/*", b"#!/bin/sh\nexit 1\n",
              b"\x7fELF\2\1\1", b"MZ\x90\0", b"<script>alert(1)</script>", *references)  # fmt: skip
    other = rng.choice(others)
    match rng.randrange(3):
        case 0:
            return file + other
        case 1:
            return other + file
        case _:
            return file[:6] + other + file[6:]


def refer(address: str, path: str) -> tuple[bytes, ...]:
    """Files of formats that refer to others: what follows them connects there, or opens that."""
    names = (f"http://{address}/a", f"file://{path}", path)
    found = []
    for name in names:
        found += [
            f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{name}"/></svg>',
            f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY e SYSTEM "{name}">]><svg>&e;</svg>',
            f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{name}\n#EXT-X-ENDLIST\n",
            f"[playlist]\nFile1={name}\nNumberOfEntries=1\n",
            f'FILE "{name}" WAVE\n  TRACK 01 AUDIO\n    INDEX 01 00:00:00\n',
            f"ffconcat version 1.0\nfile '{name}'\n",
            f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({name}) (r) file run\nshowpage\n",
            f"push graphic-context\nimage over 0,0 0,0 'url({name})'\npop graphic-context\n",
            f"%PDF-1.4\n1 0 obj<</Type/Action/S/URI/URI({name})>>endobj\ntrailer<</Root 1 0 R>>\n",
            f"<smil><body><audio src='{name}'/></body></smil>",
            f"v=0\no=- 0 0 IN IP4 {address}\nc=IN IP4 {address}\nm=audio 9 RTP/AVP 0\n",
        ]
    atoms = [_make_movie(name.encode()) for name in names]
    return (*(text.encode() for text in found), *atoms)


def _make_movie(name: bytes) -> bytes:
    """An MP4 whose samples are elsewhere: an `alis` or `url ` in its data reference."""

    def box(kind: bytes, content: bytes) -> bytes:
        return (len(content) + 8).to_bytes(4) + kind + content

    url = box(b"url ", b"\0\0\0\0" + name + b"\0")
    reference = box(b"dinf", box(b"dref", b"\0\0\0\0\0\0\0\1" + url))
    track = box(b"trak", box(b"mdia", box(b"minf", reference)))
    return box(b"ftyp", b"isom\0\0\2\0isomiso2mp41") + box(b"moov", track)


def rubbish(rng: random.Random) -> bytes:
    size = rng.choice((0, 0, 1, 2, 11, 12, 100, 5000))
    return rng.choice((rng.randbytes(size), b"\0" * size, b"\xff" * size))


class Kind(NamedTuple):
    """Files of one kind, such as pictures, and what is done to them."""

    honest: Callable[[], tuple[bytes, ...]]
    foreign: Callable[[], tuple[bytes, ...]]  # of formats that are not read
    lie: Callable[[random.Random], bytes]
    bomb: Callable[[random.Random], bytes]
    #: Where the shares of each harm end, in the order of `HARMS`; the rest is whole.
    shares: Sequence[float]


HARMS = (
    *("damaged", "lies", "bomb", "polyglot", "refers", "joined", "other format", "rubbish"),
    "whole",
)


def make_hostile(
    rng: random.Random, kind: Kind, references: tuple[bytes, ...]
) -> tuple[str, bytes]:
    """Return a harm, and a file with it; `references` name other files and addresses."""
    harm = HARMS[bisect_right(kind.shares, rng.random())]
    match harm:
        case "damaged":
            return harm, damage(rng, rng.choice(kind.honest()))
        case "lies":
            return harm, kind.lie(rng)
        case "bomb":
            return harm, kind.bomb(rng)
        case "polyglot":
            return harm, polyglot(rng, rng.choice(kind.honest()), references)
        case "refers":
            return harm, rng.choice(references)
        case "joined":
            one = rng.choice(kind.honest())
            two = rng.choice((*kind.honest(), *kind.foreign()))
            return harm, rng.choice((splice, relabel))(rng, one, two)
        case "other format":
            return harm, damage(rng, rng.choice(kind.foreign()))
        case "rubbish":
            return harm, rubbish(rng)
    return harm, rng.choice(kind.honest())
