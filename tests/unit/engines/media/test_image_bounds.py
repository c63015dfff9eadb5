"""Images that a few bytes make dear: refused at once, and nothing honest with them."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable

import pytest
from PIL import Image as Pillow

from servekit.engines.media import image_bounds
from servekit.engines.media.image_bounds import TooCostly, check_cost
from servekit.engines.media.media_prompts import decode_images
from servekit.errors import RequestError
from servekit.protocol.messages import Media
from tests.fuzz.media import pictures

PLAIN = pictures.paint()


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: pictures.bomb_scans(64, 100), "image/jpeg", "more than 64 scans"),
        (lambda: pictures.bomb_comments(300), "image/gif", "more than 256 comments"),
        (pictures.bomb_exif_png, "image/png", "EXIF has more than 16777216 bytes"),
        (pictures.bomb_exif_jpeg, "image/jpeg", "EXIF has more than 16777216 bytes"),
        (pictures.bomb_exif_webp, "image/webp", "EXIF has more than 16777216 bytes"),
        (pictures.bomb_profile, "image/png", "EXIF has more than 16777216 bytes"),
        (lambda: pictures.bomb_line("PNG", 60_000), "image/png", "100 times as long as the other"),
    ],
)
def test_a_bomb_is_refused_before_it_takes_memory(
    make: Callable[[], bytes], kind: str, words: str
) -> None:
    bomb = make()
    assert len(bomb) < 2**20
    tracemalloc.start()
    with pytest.raises(RequestError, match=words) as refused:
        decode_images([Media(bomb, kind)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert peak < 2 * image_bounds.MAX_EXIF_BYTES


def test_comments_in_a_file_of_one_image_and_after_it() -> None:
    large = pictures.save(PLAIN.convert("P"), "GIF", comment=b"c" * (2**20 + 1))
    with pytest.raises(TooCostly):
        check_cost(large, "image/gif")
    plain = pictures.save(PLAIN.convert("P"), "GIF", comment=b"a few words")
    check_cost(plain, "image/gif")
    after = plain[:-1] + b"\x21\xfe\x01c\0" * 300 + plain[-1:]
    with pytest.raises(TooCostly):
        check_cost(after, "image/gif")


@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_photos_are_cheap(how: dict[str, bool | int]) -> None:
    """One with a thumbnail in its EXIF, and one that another file follows, as phones write them."""
    photo = pictures.save(PLAIN.resize((640, 480)), "JPEG", **how)
    thumbnail = Pillow.Exif()
    thumbnail[0x010E] = "a" * 3000
    check_cost(pictures.save(PLAIN, "JPEG", exif=thumbnail, **how), "image/jpeg")
    check_cost(photo + b"\xff\xda\0\2" * 500, "image/jpeg")


def test_the_largest_exif_of_a_camera_is_read() -> None:
    exif = Pillow.Exif()
    exif[0x0112], exif[0x927C] = 6, b"m" * 60_000
    made = pictures.save(PLAIN, "JPEG", exif=exif)
    (upright,) = decode_images([Media(made, "image/jpeg")])
    assert upright.size == PLAIN.size[::-1]


def test_panoramas_are_no_lines() -> None:
    file = io.BytesIO()
    Pillow.new("RGB", (2000, 20)).save(file, "PNG")
    assert decode_images([Media(file.getvalue(), "image/png")])[0].size == (2000, 20)


def test_a_file_of_half_the_headers_ends() -> None:
    for kind, whole in (("image/gif", pictures.save(PLAIN.convert("P"), "GIF")),
                        ("image/jpeg", pictures.save(PLAIN, "JPEG"))):  # fmt: skip
        for size in range(0, len(whole), 7):
            check_cost(whole[:size], kind)
