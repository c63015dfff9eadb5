"""An engine in one file: a Markov chain over bytes, learnt from the texts of a folder.

A token is a byte; one more, END, is the end of a line, where an answer stops.
"""

import codecs
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from servekit import plugin
from servekit.plugin import (
    Capability,
    ChatMessage,
    Emit,
    Engine,
    Job,
    Load,
    LoadError,
    ModelInfo,
    Report,
    RequestError,
)

END = 256
SERVES: tuple[Capability, ...] = ("generate", "tokenize", "detokenize")


class ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in token_ids if token != END))

    def flush(self) -> str:
        return ""


class ByteCodec:
    def encode(self, text: str, limit: int | None = None) -> list[int]:
        return list(text.encode())

    encode_plain = encode

    def render_chat(self, messages: Sequence[ChatMessage], *_: Any, **more: Any) -> list[int]:
        return self.encode("\n".join(message.content for message in messages))

    def decoder(self, markers: Collection[str] = ()) -> ByteDecoder:
        return ByteDecoder()


class MarkovEngine(Engine):
    def __init__(self, spec: plugin.WorkerSpec) -> None:
        super().__init__(spec)
        self.codec = ByteCodec()
        self.vocab_size = END + 1
        self._order: int = spec.options["order"]
        self._slots: int = spec.options["slots"]
        self._chain: dict[bytes, Counter[int]] = defaultdict(Counter)  # what follows, how often
        self._jobs: dict[int, Job] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def load(self, report: Report) -> ModelInfo:
        for number, text in enumerate(sorted(Path(self.spec.path).glob("*.txt"))):
            report(plugin.Progress("load", number))
            for line in text.read_bytes().splitlines():
                self._learn(line)
        if not self._chain:
            raise LoadError(f"{self.spec.path} holds no .txt to learn from")
        context = self.spec.max_context or 4096
        return ModelInfo(context, self._slots, True, "MarkovChain", "none", "cpu", serves=SERVES)

    def start(self, emit: Emit) -> None:
        self._emit = emit
        self._thread.start()

    def submit(self, job: Job) -> None:
        if not all(0 <= token <= END for token in job.prompt_ids):
            raise RequestError("a token is a byte, or 256 for the end of a line", param="prompt")
        with self._changed:
            if not self._jobs:
                self._progress_at = time.monotonic()
            self._jobs[job.id] = job
            self._changed.notify()

    def cancel(self, job_id: int) -> None:
        with self._changed:
            self._jobs.pop(job_id, None)

    def load_now(self) -> Load:
        with self._changed:
            age_s = time.monotonic() - self._progress_at if self._jobs else 0.0
            running = min(len(self._jobs), self._slots)
            return Load(running, len(self._jobs) - running, 0.0, age_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _learn(self, line: bytes) -> None:
        for at, token in enumerate([*line, END]):
            for start in range(max(0, at - self._order), at + 1):
                self._chain[line[start:at]][token] += 1

    def _loop(self) -> None:
        while True:  # what this raises ends the worker, which is replaced
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                outputs = [self._step(job) for job in list(self._jobs.values())[: self._slots]]
                self._progress_at = time.monotonic()
            self._emit(outputs)

    def _step(self, job: Job) -> plugin.StepOutput:
        token = self._next(job)
        output = plugin.StepOutput(job.id, [] if token == END else [token])
        job.emitted += output.token_ids
        if token == END or len(job.emitted) == job.params.max_tokens:
            output.finish = "stop" if token == END else "length"
            del self._jobs[job.id]
        return output

    def _next(self, job: Job) -> int:
        """The next token. It depends on what stands there, the seed and the position alone."""
        params, at = job.params, len(job.emitted)
        goes_on = params.ignore_eos or at < params.min_tokens
        last = [*job.prompt_ids[-self._order :], *job.emitted[-self._order :]][-self._order :]
        state = bytes(token for token in last if token != END)
        follow: list[tuple[int, int]] = []
        while not follow:  # the longest state that was ever seen; the empty one was
            seen = self._chain.get(state, Counter()).most_common()
            follow = [(token, count) for token, count in seen if token != END or not goes_on]
            state = state[1:]
        heat = self._stated(params.temperature, "temperature", 1.0)
        if not heat or len(follow) == 1:
            return follow[0][0]
        follow = follow[: int(self._stated(params.top_k, "top_k", 0)) or None]
        weights = [(count / follow[0][1]) ** (1 / heat) for _, count in follow]
        kept = sum(weights) * self._stated(params.top_p, "top_p", 1.0)
        while sum(weights[:-1]) >= kept:
            weights.pop()
        draw = random.Random(None if params.seed is None else f"{params.seed} {at}")
        return draw.choices([token for token, _ in follow[: len(weights)]], weights)[0]

    def _stated(self, asked: float | None, name: str, default: float) -> float:
        """What the request asks for, else what the file says, else `default`."""
        return self.spec.sampling.get(name, default) if asked is None else asked
