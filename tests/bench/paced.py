"""An engine without a model that keeps a pace, for servekit and for vLLM's Rust front end alike.

A request for one token has it at once; any other gets a token each step. The answer is the same for
all: some words of the model's own vocabulary, each with one MARK, over and over.

servekit's engine writes down what its thread has cost without the worker's part, which vLLM's front
end does not have either; see `tests.bench.cpu.read_own_s`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servekit.plugin import Emit, Engine, Job, Load, ModelInfo, Report, StepOutput, WorkerSpec

NAME = "paced"
#: A file of the model's folder.
OWN = "own"
#: What a token says once, and a chunk nowhere else: ids have letters by chance.
MARK = " d"
WORDS = 512
STEP_S = 0.01
CONTEXT = 131_072
SLOTS = 4096
_ROOT = Path(__file__).parents[2]


def copy_model(source: Path, folder: Path) -> Path:
    """Make a model folder with the tokenizer of `source` and a context of CONTEXT tokens."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).symlink_to(source / name)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((source / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def read_words(folder: Path) -> dict[str, int]:
    """Return the vocabulary's words that follow a space, with their tokens."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {
        text[1:]: token
        for text, token in sorted(vocabulary.items(), key=lambda pair: pair[1])
        if text[0] == "Ġ" and text[1:].isascii() and text[1:].isalpha()
    }


def read_answer(folder: Path) -> list[int]:
    """Return the tokens of the answer."""
    words = read_words(folder)
    return [token for word, token in words.items() if f" {word}".startswith(MARK)][:WORDS]


class Pace:
    """The running requests, by any key, and what a step brings each of them."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer
        self.runs: dict[Any, list[int]] = {}  # tokens that it has, and is to have

    def add(self, key: Any, tokens: int, done: int = 0) -> None:
        self.runs[key] = [done, tokens]

    def drop(self, key: Any) -> None:
        self.runs.pop(key, None)

    @property
    def first(self) -> int:
        """The only token of a request for one."""
        return self._answer[0]

    def step(self) -> list[tuple[Any, int, bool]]:
        """Return each request's next token, and whether it is the last."""
        answer, size = self._answer, len(self._answer)
        made = []
        for key, run in self.runs.items():
            done = run[0]
            run[0] = done + 1
            made.append((key, answer[done % size], done + 1 >= run[1]))
        for key, _, last in made:
            if last:
                del self.runs[key]
        return made


# ---------------------------------------------------------------- servekit's worker


def installed(folder: Path) -> dict[str, str]:
    """Bring the engine as a package in `folder` would; the environment that finds it."""
    info = folder / f"{NAME}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[servekit.engines]\n{NAME} = {__name__}:PacedEngine\n")
    paths = (str(folder), str(_ROOT), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def model_entry(name: str, folder: Path) -> dict[str, Any]:
    """A model of it, for the configuration file."""
    return {"name": name, "engine": NAME, "path": str(folder), "device": "cpu", "replicas": 1}


def _map_own(model: str) -> mmap.mmap:
    with Path(model, OWN).open("w+b") as file:
        file.write(bytes(8))
        file.flush()
        return mmap.mmap(file.fileno(), 8)


class PacedEngine(Engine):
    """With the codec that servekit's vLLM engine has."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._changed = threading.Condition()
        self._closed = False

    def load(self, report: Report) -> ModelInfo:
        from transformers import AutoTokenizer

        from servekit.engines.text.tokenizer import TokenizerCodec

        tokenizer = AutoTokenizer.from_pretrained(self.spec.path)
        self.codec = TokenizerCodec(tokenizer)
        self.vocab_size = len(tokenizer)
        self._pace = Pace(read_answer(Path(self.spec.path)))
        self.codec.start_proof()
        return ModelInfo(
            max_context=CONTEXT,
            slots=SLOTS,
            chat=True,
            architecture="paced",
            dtype="none",
            device="cpu",
            detail="keeps a pace",
            serves=("generate", "tokenize", "detokenize"),
            dialect=self.codec.find_dialect(self.spec, ()),
        )

    def identify(self, *, portable: bool = False) -> str:
        return ""  # its answer is the same whatever the files are

    def start(self, emit: Emit) -> None:
        self._emit = emit
        self._own = _map_own(self.spec.path)
        self._thread = threading.Thread(target=self._run_steps, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        tokens = job.params.max_tokens or 0
        if tokens == 1:
            self._emit([StepOutput(job.id, [self._pace.first], "length")])
            return
        with self._changed:
            self._pace.add(job.id, tokens, len(job.emitted))
            self._changed.notify()

    def cancel(self, job_id: int) -> None:
        with self._changed:
            self._pace.drop(job_id)

    def load_now(self) -> Load:
        return Load(len(self._pace.runs), 0, 0.0, 0.0)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _run_steps(self) -> None:
        emitting_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pace.runs or self._closed)
            due_s = time.monotonic()
            while self._pace.runs and not self._closed:
                due_s = max(due_s + STEP_S, time.monotonic())
                time.sleep(max(0.0, due_s - time.monotonic()))
                with self._changed:
                    made = self._pace.step()
                outputs = [StepOutput(k, [t], "length" if last else None) for k, t, last in made]
                before_s = time.thread_time()
                self._emit(outputs)
                after_s = time.thread_time()
                emitting_s += after_s - before_s
                self._own[:] = struct.pack("d", after_s - emitting_s)
            if self._closed:
                return
