"""Hostile pictures and sounds to the decoders, and to each API of models that see and hear.

    python -m tests.fuzz.media --files 30000 --requests 30000 --seed 1
    python -m tests.fuzz.media --converted --files 0 --requests 12000 --warm-up 5000

First the files go to the decoders alone, in a process of their own, and then others over HTTP to
`servekit up` with a LLaVA, a Qwen2-Audio and a Whisper of random weights; with --converted a
Qwen2-VL and a Qwen2-Audio in llama.cpp, and a Whisper in faster-whisper. Files that refer to others
name a port and a file that nobody may ask for; with strace installed, every file that a process
opens and every address that it connects to is looked at. Prints Markdown tables; exit code 1 if an
answer was wrong, as with `tests.fuzz`, a process died or grew, a file took too long, or one was
opened that was not named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from servekit.errors import ServekitError
from tests.fuzz.__main__ import GLIBC, GROWTH, STEADY, aftermath, attack
from tests.fuzz.media import traces
from tests.fuzz.media.damage import refer
from tests.fuzz.media.requests import MediaMaker
from tests.fuzz.processes import Usage, Watched
from tests.fuzz.report import MIB
from tests.fuzz.run import Fuzz
from tests.integration.instance import PROGRAM, Instance
from tests.media_models import write_converted, write_models

#: One thread for each library: they are many on two cores, and spin.
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: What the decoders' process may need at once: the largest picture, in three copies of four bytes.
PEAK_BYTES = 2 * 2**30
#: Of the decoders' process, which keeps what the largest pictures have left.
DECODER_GROWTH = 0.5


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.media",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--files", type=int, default=30_000, help="to the decoders alone")
    parser.add_argument("--requests", type=int, default=30_000, help="over HTTP")
    parser.add_argument("--warm-up", type=int, default=15_000, help="requests before those")
    parser.add_argument("--converted", action="store_true", help="llamacpp and faster_whisper")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=4, help="connections at once")
    parser.add_argument("--steady", type=float, default=STEADY, help="growth that is allowed")
    parser.add_argument("--growth", type=float, default=GROWTH, help="the same, steady or not")
    return parser.parse_args(argv)


@dataclass(slots=True)
class Bait:
    """An address and a file that hostile files name, and who asked for them."""

    address: str
    path: Path
    asked: list[str] = field(default_factory=list)

    @property
    def references(self) -> tuple[bytes, ...]:
        return refer(self.address, str(self.path))


@contextlib.contextmanager
def lay_bait(folder: Path) -> Iterator[Bait]:
    path = folder / "bait"
    path.write_text("nobody reads this")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bait = Bait(f"127.0.0.1:{listener.getsockname()[1]}", path)

        def listen() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    asking, address = listener.accept()
                    bait.asked.append(f"the bait was asked for by {address}")
                    asking.close()

        threading.Thread(target=listen, daemon=True).start()
        yield bait
        listener.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------- the decoders alone


def decode_files(wish: argparse.Namespace, folder: Path, bait: Bait) -> list[str]:
    """What was wrong as the decoders read files, a child that died on one included."""
    at, trace = folder / "at", folder / "decoder.trace"
    module = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.media.decoding"]
    told = ["--files", str(wish.files), "--seed", str(wish.seed), "--at", str(at)]
    told += ["--address", bait.address, "--canary", str(bait.path)]
    traced = traces.is_possible()
    before = traces.command(trace) if traced else []
    env = os.environ | GLIBC | THREADS
    began_s = time.monotonic()
    with (folder / "decoder.log").open("w+") as log:
        done = subprocess.run(
            [*before, *module, *told], stdout=subprocess.PIPE, stderr=log, env=env, check=False
        )
        log.seek(0)
        said = log.read()
    if done.returncode:
        number = at.read_text().splitlines()[0]
        return [f"the decoders ended with {done.returncode} at file {number}: {said[-2000:]}"]
    found = json.loads(done.stdout)
    print(decoder_table(found["came"]))
    took_s, number, label = found["slowest"]
    usage = Usage("the decoders", 0, 1 / 6, rss_bytes=[tuple(seen) for seen in found["rss"]])
    sizes = (usage.start_bytes, usage.warm_bytes, usage.end_bytes, found["peak_bytes"])
    shown = ", ".join(f"{size / MIB:.0f}" for size in sizes)
    lasted_s = time.monotonic() - began_s
    print(
        f"\n{wish.files} files in {lasted_s:.0f} s; the slowest took {took_s:.1f} s of a core (file"
        f" {number}, {label}). Memory at the start, after a sixth, at the end, at its peak: {shown}"
        f" MiB. {'Traced' if traced else 'Not traced: no strace'}.\n"
    )
    wrong: list[str] = found["wrong"]
    if usage.growth > DECODER_GROWTH:
        wrong.append(f"the decoders grew by {usage.growth:.0%}")
    if found["peak_bytes"] > PEAK_BYTES:
        wrong.append(f"the decoders took {found['peak_bytes'] / MIB:.0f} MiB at once")
    if traced:
        strangers = traces.find_strangers(trace, found["begin_s"], [])
        wrong += [f"the decoders: {call}" for call in strangers if str(at) not in call][:20]
    return wrong


def decoder_table(came: dict[str, dict[str, int]]) -> str:
    lines = ["| files | decoded | refused |", "|---|--:|--:|"]
    for label, counts in sorted(came.items()):
        total = sum(counts.values())
        refused = counts.get("refused", 0)
        lines.append(f"| {label} | {total - refused} | {refused} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- over HTTP


def send_files(wish: argparse.Namespace, folder: Path, bait: Bait) -> list[str]:
    """What was wrong as files came in requests."""
    traced = traces.is_possible()
    trace = folder / "up.trace"
    before = traces.command(trace) if traced else []
    start: dict[str, Any] = {"env": GLIBC | THREADS, "program": (*before, *PROGRAM)}
    run = folder / "up"
    run.mkdir()
    models = write_converted(folder) if wish.converted else write_models(folder)
    with Instance.up(run, models, **start) as instance:
        status = instance.until_settled(within_s=300)
        host, port = urlsplit(status.url).hostname, urlsplit(status.url).port
        assert host and port
        total = wish.warm_up + wish.requests
        maker = MediaMaker(wish.seed, bait.references)
        one = Fuzz(host, port, maker, total)
        watched = Watched(instance.pid, status, wish.warm_up / total)
        begin_s = time.time()
        wrong = attack(one, wish, watched)
        try:
            wrong += aftermath(instance, watched, wish)
        except (ServekitError, httpx.HTTPError) as error:  # it has ended
            wrong.append(f"{error}\n{instance.log[-5000:]}")
        end_s = time.time()
    if traced:
        strangers = traces.find_strangers(trace, begin_s, [folder], until_s=end_s)
        wrong += [f"servekit: {call}" for call in strangers][:20]
        print(f"\nTraced: {len(strangers)} calls that name other files or addresses.")
    return wrong


def main(argv: Sequence[str]) -> int:
    wish = parse(argv)
    with (
        tempfile.TemporaryDirectory(prefix="servekit-fuzz-") as folder,
        tempfile.TemporaryDirectory(prefix="servekit-bait-") as elsewhere,
        lay_bait(Path(elsewhere)) as bait,
    ):
        wrong = decode_files(wish, Path(folder), bait) if wish.files else []
        wrong += send_files(wish, Path(folder), bait) if wish.requests else []
        wrong += bait.asked
    if wrong:
        print(f"\nwrong, with seed {wish.seed}:\n" + "\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
