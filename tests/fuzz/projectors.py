"""`python -m tests.fuzz.projectors`: damaged projectors, each loaded by llama.cpp in a process.

--count 1000   mutations of each projector: cut short, or with bits, numbers or bytes changed
--seed 1       of the mutations
--keep PATH    a folder for the files that killed the process

Each is refused with a sentence, or loaded; a process that is killed by a signal, or takes longer
than a minute, is reported. The changes are in the header, where lengths, types and sizes are.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf

from servekit.engines.llamacpp.engine import LlamaCppEngine
from servekit.errors import LoadError
from tests.unit.engines.harness import make_spec, write_tiny_llama
from tests.unit.engines.llamacpp.seeing_gguf import convert_model
from tests.unit.engines.seeing_model import (
    write_gemma3,
    write_idefics3,
    write_qwen2_audio,
    write_qwen2_vl,
)

WRITERS = (write_qwen2_vl, write_idefics3, write_gemma3, write_qwen2_audio)
#: llama.cpp hears 30 s at once, whatever the model says.
_SIZES: dict[str, dict[str, Any]] = {"qwen2_audio": {"hears_s": 30}}
REFUSED, LOADED, RAISED = range(3)
LIMIT_S = 30
#: Numbers that are likely to be mistaken for a length, a type or a size.
_NUMBERS = (0, 1, 2, 3, 5, 6, 7, 8, 9, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.projectors")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        tiny = write_tiny_llama(root / "tiny")
        found = Counter[str]()
        for write in WRITERS:
            name = write.__name__.removeprefix("write_")
            folder = write(root / name, tiny, **_SIZES.get(name, {}))
            model, projector = convert_model(folder, root / f"{name}-gguf")
            whole, header = projector.read_bytes(), find_header(projector)
            file = root / f"{name}-damaged.gguf"
            for kind, content in mutate(whole, header, args.count, args.seed):
                file.write_bytes(content)
                outcome = try_projector(model, file)
                found[outcome] += 1
                if outcome.startswith(("signal", "time", "raised")):
                    print(f"{name}: {kind}: {outcome}", flush=True)
                    if args.keep is not None:
                        args.keep.mkdir(parents=True, exist_ok=True)
                        shutil.copy(file, args.keep / f"{name}-{found[outcome]}-{outcome}.gguf")
    print(dict(found))
    return int(any(outcome.startswith(("signal", "time", "raised")) for outcome in found))


def mutate(whole: bytes, header: int, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield files damaged within the first `header` bytes, each with a word on its damage."""
    chance = random.Random(seed)
    for _ in range(count):
        kind = chance.choice(("cut", "bit", "number", "bytes"))
        made = bytearray(whole)
        at = chance.randrange(4, header)
        if kind == "cut":
            del made[chance.choice((at, chance.randrange(len(whole)))) :]
        elif kind == "bit":
            made[at] ^= 1 << chance.randrange(8)
        elif kind == "number":
            made[at : at + 4] = struct.pack("<I", chance.choice(_NUMBERS))
        else:
            made[at : at + 8] = chance.randbytes(8)
        yield f"{kind} at {at}", bytes(made)


def find_header(path: Path) -> int:
    """Return the size of the header, which ends with the entry of the last tensor."""
    reader = gguf.GGUFReader(path)
    last = reader.tensors[-1].field
    return int(last.offset + sum(part.nbytes for part in last.parts))


def try_projector(model: Path, file: Path) -> str:
    """Load a projector in a process of its own, and return what became of it."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        load_projector(model, file)
    limit = time.monotonic() + LIMIT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "time"
        time.sleep(0.002)
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return ("refused", "loaded", "raised")[os.WEXITSTATUS(status)]


def load_projector(model: Path, file: Path) -> None:
    """Load it, and end the process with one of the codes above."""
    code = RAISED
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        options = {"mmproj": str(file), "threads": 1}
        LlamaCppEngine(make_spec(model, engine="llamacpp", options=options)).load(lambda one: None)
        code = LOADED
    except LoadError:
        code = REFUSED
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
