"""`python -m tests.fuzz.media.decoding`: files through the decoders alone, in this process.

It prints what came of them, as JSON, and keeps the number of the file it is at in `--at`, which
tells the one that ended it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from servekit.engines.media.media_prompts import decode_images
from servekit.engines.media.recording import MAX_AUDIO_S, decode_recording
from servekit.errors import RequestError
from servekit.gateway.api.images import read_file
from servekit.protocol.messages import Media
from servekit.system import procfs
from tests.fuzz.media.damage import refer
from tests.fuzz.media.pictures import honest as pictures
from tests.fuzz.media.pictures import make_picture
from tests.fuzz.media.sounds import RATE, make_sound
from tests.fuzz.media.sounds import honest as sounds

KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif")
#: Processor time that one file may take. A picture of 67 million pixels takes one to two seconds.
BOUND_S = 15.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--canary", required=True)
    parser.add_argument("--at", type=Path, required=True)
    return parser.parse_args()


def make(rng: random.Random, references: tuple[bytes, ...]) -> tuple[str, bytes]:
    """A file, and what it is."""
    kind, maker = ("picture", make_picture) if rng.random() < 0.6 else ("sound", make_sound)
    label, file = maker(rng, references)
    return f"{kind}, {label}", file


def decode_picture(rng: random.Random, file: bytes) -> str:
    """By the gateway's look at it, then by the decoder, which a worker of another release asks."""
    try:
        kind, came = read_file(file, "image").kind, "decoded"
    except RequestError:
        kind, came = rng.choice(KINDS), "refused by the gateway, decoded"
    try:
        decode_images([Media(file, kind)])
    except RequestError:
        return "refused"
    return came


def decode_sound(file: bytes) -> str:
    try:
        decode_recording(file, RATE, MAX_AUDIO_S)
    except RequestError:
        return "refused"
    return "decoded"


def main() -> None:
    wish = parse()
    references = refer(wish.address, wish.canary)
    for picture in pictures():  # imports what decoders import
        decode_picture(random.Random(1), picture)
    for sound in sounds():
        decode_sound(sound)
    came: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    slowest: tuple[float, int, str] = (0.0, -1, "")
    rss: list[tuple[float, int]] = []
    begin_s = time.time()
    with wish.at.open("wb", buffering=0) as at:
        for number in range(wish.first, wish.first + wish.files):
            at.seek(0)
            at.write(b"%d\n" % number)
            rng = random.Random(f"decoding:{wish.seed}:{number}")
            label, file = make(rng, references)
            began_s, result = time.process_time(), "wrong"
            try:
                if label.startswith("picture"):
                    result = decode_picture(rng, file)
                else:
                    result = decode_sound(file)
            except Exception as error:
                wrong.append(f"file {number}, {label}: {type(error).__name__}: {error}"[:300])
            took_s = time.process_time() - began_s
            came.setdefault(label, Counter())[result] += 1
            slowest = max(slowest, (took_s, number, label))
            if took_s > BOUND_S:
                wrong.append(f"file {number}, {label}: {took_s:.1f} s")
            if number % 20 == 0:
                progress = (number - wish.first) / wish.files
                rss.append((progress, procfs.rss_bytes(os.getpid())))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    told: dict[str, Any] = {"begin_s": begin_s, "came": came, "wrong": wrong, "slowest": slowest}
    json.dump(told | {"rss": rss, "peak_bytes": peak}, sys.stdout)


if __name__ == "__main__":
    main()
