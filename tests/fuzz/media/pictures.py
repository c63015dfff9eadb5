"""Pictures that are damaged, that lie, or that ask for more than they are."""

from __future__ import annotations

import functools
import io
import random
import struct
import zlib
from typing import Any

from PIL import Image

from tests.fuzz.media import damage
from tests.fuzz.media.damage import LIES

#: The formats that servekit reads, and some of the others that Pillow would.
READ = ("PNG", "JPEG", "WEBP", "GIF")
OTHERS = ("TIFF", "ICO", "BMP", "PPM", "TGA", "PCX", "PDF", "EPS", "JPEG2000", "DDS", "SGI", "MPO",
          "ICNS", "IM", "MSP", "SPIDER", "XBM", "AVIF")  # fmt: skip


def save(picture: Any, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **how)
    return file.getvalue()


def paint(mode: str = "RGB", size: tuple[int, int] = (37, 23)) -> Any:
    noise = random.Random(7).randbytes(size[0] * size[1] * 3)
    return Image.frombytes("RGB", size, noise).convert(mode)


@functools.cache
def honest() -> tuple[bytes, ...]:
    """Whole files of the formats that are read, in many forms."""
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, frames = paint(), [paint("P").rotate(90 * turn) for turn in range(3)]
    made = [save(paint(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")]
    made += [save(paint(mode), "JPEG") for mode in ("L", "RGB", "CMYK")]
    made += [save(plain, "JPEG", progressive=True, subsampling=2, exif=exif, comment=b"a" * 50)]
    made += [save(plain, "WEBP", lossless=one, exif=exif) for one in (False, True)]
    made += [save(paint("RGBA"), "WEBP"), save(frames[0], "GIF"), save(paint("L"), "GIF")]
    made += [save(plain, "PNG", exif=exif, icc_profile=b"i" * 300)]
    made += [save(paint(size=size), kind) for size in ((1, 1), (1, 900), (900, 1)) for kind in READ]
    made += [
        save(frames[0], kind, save_all=True, append_images=frames[1:])
        for kind in ("PNG", "GIF", "WEBP")
    ]
    return tuple(made)


@functools.cache
def foreign() -> tuple[bytes, ...]:
    """Files of formats that are not read, as far as this Pillow writes them."""
    made = []
    for kind in OTHERS:
        for mode in ("RGB", "L", "1", "F"):
            try:
                made.append(save(paint(mode, (32, 32)), kind))
                break
            except (OSError, KeyError, ValueError):  # not this mode, or no encoder
                continue
    return tuple(made)


# ---------------------------------------------------------------- lies


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """A chunk of a PNG, with a checksum that is right, and the size that it says."""
    sized = struct.pack(">I", len(content) if size is None else size)
    return sized + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(*chunks: bytes, width: int = 4, height: int = 4, how: bytes = b"\x08\2\0\0\0") -> bytes:
    """A PNG of these chunks, between its header and its own pixels, which are of 4 × 4."""
    header = chunk(b"IHDR", struct.pack(">II", width, height) + how)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 13 * 4))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + chunk(b"IEND", b"")


def lie(rng: random.Random) -> bytes:
    """A header that says what is not so."""
    one, two = rng.choice(LIES), rng.choice(LIES)
    match rng.randrange(7):
        case 0:
            how = bytes((rng.choice((1, 2, 4, 8, 16, 3)), rng.choice((0, 2, 3, 4, 6, 5)), 0, 0,
                         rng.randrange(2)))  # fmt: skip
            return png(width=one, height=two, how=how)
        case 1:
            name = rng.choice((b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"PLTE", b"tRNS",
                               b"acTL", b"fcTL", b"fdAT", b"IDAT", b"gAMA", b"pHYs"))  # fmt: skip
            return png(chunk(name, rng.randbytes(rng.choice((0, 1, 8, 26, 300))), one))
        case 2:
            made = bytearray(save(paint("P"), "GIF"))
            at = rng.choice((6, made.index(b",", 20) + 1, made.index(b",", 20) + 5))
            made[at : at + 4] = struct.pack("<HH", one & 0xFFFF, two & 0xFFFF)
            return bytes(made)
        case 3:
            made = bytearray(save(paint(), "JPEG", progressive=rng.random() < 0.5))
            at = max(made.find(b"\xff\xc0"), made.find(b"\xff\xc2"))
            made[at + 5 : at + 9] = struct.pack(">HH", one & 0xFFFF, two & 0xFFFF)
            if rng.random() < 0.4:  # components and how they are sampled
                made[at + 9 + rng.randrange(8)] = rng.randrange(256)
            return bytes(made)
        case 4:
            made = bytearray(save(paint(), "JPEG"))
            at = rng.choice([at for at in range(len(made) - 3) if made[at] == 0xFF])
            made[at + 2 : at + 4] = struct.pack(">H", one & 0xFFFF)
            return bytes(made)
        case 5:
            made = bytearray(save(paint("RGBA"), "WEBP", lossless=rng.random() < 0.5))
            at = rng.choice((4, 16, 20, 24, 26, 27))
            made[at : at + 3] = (one & 0xFFFFFF).to_bytes(3, "little")
            return bytes(made)
        case _:
            entries = [(rng.choice((0x0112, 0x8769, 0x8825, 0xA005, rng.randrange(65536))),
                        rng.randrange(14), rng.choice(LIES), rng.choice((8, 0, 20, one)))
                       for _ in range(rng.randrange(1, 9))]  # fmt: skip
            return png(chunk(b"eXIf", directory(entries)))


def directory(entries: list[tuple[int, int, int, int]], more: bytes = b"") -> bytes:
    """A directory of EXIF: tags, types, counts and places."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + b"\0" * 4 + more


# ---------------------------------------------------------------- bombs


@functools.cache
def bomb_exif(tags: int = 20_000, each: int = 300_000) -> bytes:
    """Entries that all have the same large value: the product of both in memory."""
    entries = [(tag + 1000, 1, each, 20) for tag in range(tags)]
    return directory(entries, b"x" * max(0, each + 64 - 12 * tags))


def bomb_exif_png() -> bytes:
    return png(chunk(b"eXIf", bomb_exif()))


def bomb_exif_jpeg() -> bytes:
    """The same over many segments, which Pillow joins."""
    plain, exif = save(paint(), "JPEG"), bomb_exif()
    parts = [b"Exif\0\0" + exif[at : at + 65_000] for at in range(0, len(exif), 65_000)]
    segments = [b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts]
    return plain[:2] + b"".join(segments) + plain[2:]


def bomb_exif_webp() -> bytes:
    return save(paint(), "WEBP", exif=bomb_exif())


@functools.cache
def bomb_scans(side: int = 4000, scans: int = 5000) -> bytes:
    """A progressive JPEG with a scan that says nothing of all its pixels, again and again."""
    made = save(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    at = made.rindex(b"\xff\xda")
    return made[:-2] + made[at:-2] * scans + made[-2:]


@functools.cache
def bomb_comments(count: int = 200_000) -> bytes:
    """A GIF with comments that are joined one by one."""
    made = save(paint("P"), "GIF")
    at = made.index(b",", 781)
    return made[:at] + b"\x21\xfe\x01c\0" * count + made[at:]


@functools.cache
def bomb_frames(kind: str, count: int = 2000) -> bytes:
    frames = [Image.new("L", (2, 2), at % 256) for at in range(count)]
    if kind == "TIFF":
        return save(frames[0], kind, save_all=True, append_images=frames[1:])
    return save(frames[0], kind, save_all=True, append_images=frames[1:], duration=10)


@functools.cache
def bomb_texts(name: bytes) -> bytes:
    """Compressed texts of many megabytes."""
    heads = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}
    packed = zlib.compress(b"\0" * 30_000_000, 9)
    return png(chunk(name, heads[name] + packed) * 3)


@functools.cache
def bomb_chunks() -> bytes:
    return png(chunk(b"tEXt", b"a\0b") * 100_000)


@functools.cache
def bomb_pixels(kind: str, side: int) -> bytes:
    """A picture of one colour: few bytes, many pixels; those over 8192 × 8192 are refused."""
    return save(Image.new("L", (side, side)), kind)


@functools.cache
def bomb_stream() -> bytes:
    """Pixels of 4 × 4 that go on for a hundred megabytes."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100_000_000, 9))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


@functools.cache
def bomb_profile() -> bytes:
    """EXIF as ImageMagick writes it, in hexadecimal digits in a text that is compressed."""
    text = b"\nexif\n9\n" + bomb_exif(20_000, 250_000).hex().encode()
    return png(chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text, 9)))


@functools.cache
def bomb_line(kind: str, length: int) -> bytes:
    """A line of one pixel; scaled until its short side has hundreds, it takes gigabytes."""
    return save(Image.new("RGB", (1, length)), kind)


def bomb(rng: random.Random) -> bytes:
    """One of them. The largest, of a second and more each, are few."""
    dear = rng.random() < 0.03
    makers = (
        (lambda: bomb_pixels(rng.choice(READ), rng.choice((7000, 8192))),) if dear else
        (bomb_exif_png, bomb_exif_jpeg, bomb_exif_webp, bomb_scans, bomb_comments, bomb_profile,
         bomb_chunks, bomb_stream,
         lambda: bomb_frames(rng.choice(("GIF", "WEBP", "PNG", "TIFF"))),
         lambda: bomb_texts(rng.choice((b"zTXt", b"iTXt", b"iCCP"))),
         lambda: bomb_pixels("PNG", rng.choice((8300, 14_000))),
         lambda: bomb_line("PNG", rng.choice((5000, 60_000, 10_000_000))),
         lambda: bomb_line(rng.choice(("JPEG", "GIF", "PNG")), 65_000))
    )  # fmt: skip
    return rng.choice(makers)()


def make_picture(rng: random.Random, references: tuple[bytes, ...]) -> tuple[str, bytes]:
    """A picture, and what is wrong with it."""
    kind = damage.Kind(honest, foreign, lie, bomb, (0.40, 0.58, 0.64, 0.74, 0.80, 0.88, 0.94, 0.97))
    return damage.make_hostile(rng, kind, references)
