"""The image and the recording that a server's model is tried with, as other libraries read them."""

from __future__ import annotations

import io
import itertools
import wave

from PIL import Image

from servekit.engines.command import handshake


def test_the_picture_is_a_grey_square() -> None:
    with Image.open(io.BytesIO(handshake._make_png())) as image:
        image.load()
        assert (image.size, image.mode) == ((64, 64), "RGB")
        assert image.getcolors() == [(64 * 64, (128, 128, 128))]


def test_the_recording_is_a_second_of_a_tone() -> None:
    with wave.open(io.BytesIO(handshake._make_wav())) as recording:
        assert (recording.getnchannels(), recording.getsampwidth()) == (1, 2)
        assert recording.getframerate() == recording.getnframes() == 16_000
        samples = memoryview(recording.readframes(16_000)).cast("h")
    assert set(samples) == {-4000, 4000}
    changes = sum(one != other for one, other in itertools.pairwise(samples))
    assert changes == 399, "200 waves in a second"
