"""An engine whose step raises, and whose core can be killed below its worker.

A token is a byte. The loop is servekit's own, so an exception in the step takes the way that one in
a real engine takes.
"""

import hashlib
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from servekit.engines.api.threaded_engine import LoopedEngine
from servekit.plugin import (
    Capability,
    ChatMessage,
    Job,
    LoadError,
    ModelInfo,
    Report,
    StepOutput,
    WorkerSpec,
)

#: Letters of one model never occur in the text of another: a text of two models shows the seam.
VOICES = {"upper": b"ABCDEFGHIJKLMNOP", "lower": b"abcdefghijklmnop"}
SERVES: tuple[Capability, ...] = ("generate", "tokenize", "detokenize")
#: The core answers each line with one; it ends with its standard input.
CORE = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def letter_at(voice: str, prompt: bytes, position: int) -> int:
    """Return the byte at a position of the answer; it depends on nothing else."""
    digest = hashlib.blake2b(prompt + position.to_bytes(4, "big"), digest_size=1).digest()
    return VOICES[voice][digest[0] % 16]


class ByteDecoder:
    def push(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("ascii", "replace")

    def flush(self) -> str:
        return ""


class ByteCodec:
    def encode(self, text: str, limit: int | None = None) -> list[int]:
        return list(text.encode())

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def render_chat(self, messages: Sequence[ChatMessage], *_: Any, **more: Any) -> list[int]:
        return self.encode(messages[-1].content)

    def decoder(self, markers: Collection[str] = ()) -> ByteDecoder:
        return ByteDecoder()


class Row:
    """A job under way."""

    ended = None

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cancelled = False
        self.prompt = bytes(job.prompt_ids)
        self.done = len(job.emitted)


class Steps:
    """Runs all rows, one token each a step; called by the loop's thread only."""

    waiting = 0
    kv_used = 0.0

    def __init__(self, voice: str, options: dict[str, Any], core: "subprocess.Popen[str] | None"):
        self._voice = voice
        self._options = options
        self._core = core
        self._rows: list[Row] = []

    @property
    def running(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        self._rows.append(row)

    def cancel(self, row: Row) -> None:
        self._rows = [other for other in self._rows if other is not row]

    def step(self) -> list[tuple[Row, StepOutput]]:
        time.sleep(self._options["step_s"])
        self._ask_core()
        outputs = [(row, self._advance(row)) for row in self._rows[: self._options["slots"]]]
        self._rows = [row for row in self._rows if row.done < (row.job.params.max_tokens or 1)]
        return outputs

    def close(self) -> None:
        if self._core is not None:
            self._core.kill()
            self._core.wait()

    def _ask_core(self) -> None:
        if self._core is None:
            return
        assert self._core.stdin is not None and self._core.stdout is not None
        self._core.stdin.write("step\n")
        self._core.stdin.flush()
        if not self._core.stdout.readline():
            raise RuntimeError("the engine core has ended")

    def _advance(self, row: Row) -> StepOutput:
        word = self._options["raise_on"].encode()
        if word in row.prompt and row.done >= self._options["raise_after"]:
            raise IndexError("index 7 is out of bounds for dimension 0 with size 7")
        token = letter_at(self._voice, row.prompt, row.done)
        row.done += 1
        last = row.done >= (row.job.params.max_tokens or 1)
        return StepOutput(row.job.id, [token], "length" if last else None)


class FragileEngine(LoopedEngine):
    """A model is a folder with the file `voice`, which names one of `VOICES`."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.codec = ByteCodec()
        self.vocab_size = 256

    def load(self, report: Report) -> ModelInfo:
        voice = (Path(self.spec.path) / "voice").read_text().strip()
        if voice not in VOICES:
            raise LoadError(f"there is no voice {voice!r}")
        options = self.spec.options
        core = None
        if options["core"]:
            command = [sys.executable, "-c", CORE]
            pipe = subprocess.PIPE
            core = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._runner = Steps(voice, options, core)
        context = self.spec.max_context or 8192
        return ModelInfo(context, options["slots"], True, "Fragile", "none", "cpu", serves=SERVES)

    def submit(self, job: Job) -> None:
        self._take(Row(job))
