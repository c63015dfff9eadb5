"""Bounds of what the decoding of an image may cost beside its pixels.

Pillow bounds pixels and compressed texts. It does not bound what a few bytes of a file can ask for
again and again: scans of a JPEG, comments of a GIF, values of EXIF that all stand for one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from PIL import TiffImagePlugin

#: Scans of a JPEG; each goes over all pixels. Progressive files of encoders have about ten.
MAX_SCANS = 64
#: Comments of a GIF and their bytes; Pillow joins them one by one.
MAX_COMMENTS, MAX_COMMENT_BYTES = 256, 2**20
#: Bytes that the values of an EXIF directory may have together.
MAX_EXIF_BYTES = 2**24
_SCAN, _END = 0xDA, 0xD9
#: Markers of a JPEG that are followed by no length: TEM, restarts and the start.
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
#: The next marker after the data of a scan.
_MARKER = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
_COMMENT = 0xFE


class TooCostly(Exception):
    """Raised for an image that a decoder would need far too much time or memory for."""


def check_cost(data: bytes, kind: str) -> None:
    """Raise TooCostly for a JPEG of too many scans, and a GIF of too many comments.

    Takes milliseconds for a file of megabytes.
    """
    if kind == "image/jpeg":
        for count, _ in enumerate(_list_scans(data), 1):
            if count > MAX_SCANS:
                raise TooCostly(f"it has more than {MAX_SCANS} scans")
    elif kind == "image/gif":
        together = 0
        for count, size in enumerate(_list_comments(data), 1):
            together += size
            if count > MAX_COMMENTS or together > MAX_COMMENT_BYTES:
                raise TooCostly(
                    f"it has more than {MAX_COMMENTS} comments, or {MAX_COMMENT_BYTES} bytes of"
                    " them"
                )


def _list_scans(data: bytes) -> Iterator[int]:
    """Yield where the scans of a JPEG begin, as its decoder finds them."""
    at = 0
    while found := _MARKER.search(data, at):
        at = found.end()
        marker = data[at - 1]
        if marker == _END:
            return
        if marker == _SCAN:
            yield at
        if marker not in _BARE:
            at += max(2, int.from_bytes(data[at : at + 2]))


def _list_comments(data: bytes) -> Iterator[int]:
    """Yield the sizes of a GIF's comments up to its second image, in bytes."""
    at = 13 + _count_palette(data[10:11])
    images = 0
    while at < len(data) and images < 2:
        begin = data[at]
        at += 1
        if begin == 0x2C:  # an image
            images += 1
            at += 10 + _count_palette(data[at + 8 : at + 9])
            at = _skip_blocks(data, at)
        elif begin == 0x21:  # an extension
            label = data[at : at + 1]
            start = at + 1
            at = _skip_blocks(data, start)
            if label == bytes((_COMMENT,)):
                yield at - start
        elif begin == 0x3B:  # the end
            return


def _count_palette(flags: bytes) -> int:
    """Return the bytes of the palette that a GIF's flags announce."""
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _skip_blocks(data: bytes, at: int) -> int:
    """Return the place after a row of blocks, each of which begins with its size."""
    while at < len(data) and (size := data[at]):
        at += 1 + size
    return at + 1


class _BoundedValues(dict[int, bytes]):
    """The raw values of an EXIF directory by their tags."""

    def __init__(self) -> None:
        super().__init__()
        self._left = MAX_EXIF_BYTES

    def __setitem__(self, tag: int, value: bytes) -> None:
        self._left -= len(value)
        if self._left < 0:
            raise TooCostly(f"its EXIF has more than {MAX_EXIF_BYTES} bytes of values")
        super().__setitem__(tag, value)


class _BoundedDirectory(TiffImagePlugin.ImageFileDirectory_v2):  # type: ignore[misc]  # untyped
    """Pillow's reader of EXIF, which copies each value: entries may all have one large one."""

    def reset(self) -> None:
        super().reset()
        self._tagdata = _BoundedValues()


def bound_exif() -> None:
    """Make Pillow read EXIF within bounds, in this process. It reads some as it opens a JPEG."""
    setattr(TiffImagePlugin, "ImageFileDirectory_v2", _BoundedDirectory)  # noqa: B010 - it is a type
