"""An engine without a model, for tests and benchmarks; its options make it misbehave.

It repeats the prompt's characters, one token each (a token id is a code point), up to `max_tokens`
(by default one pass over the prompt). With a seed, or a temperature other than 0, the answer is a
rotation of the prompt drawn from the seed and the position, so that tests can tell sampled from
greedy output and can check that a continued stream is exact. Every token of the answer is certain:
its log probability is 0, and it has no alternatives.

Its embeddings are hashes of the text, of length 1: equal for equal texts, and without meaning. The
score of a document is the share of the query's characters that it has. Its labels are "letters" and
"others", with their shares of a text.

An adapter is a folder with adapter_config.json, a JSON object; its `transform` is "upper" (the
default), "lower" or "swapcase".
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import secrets
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from servekit.engines.api.adapter_table import load_adapters
from servekit.engines.api.base import (
    TOLD_TO_FAIL,
    EmbedJob,
    Emit,
    Engine,
    Job,
    Load,
    Report,
    StepOutput,
)
from servekit.engines.echo.run import (
    BLOCK,
    TRANSFORMS,
    EchoCache,
    EchoCodec,
    Run,
    Transform,
    transform_of,
)
from servekit.errors import EngineFailed, LoadError, RequestError
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import Capability, Dialect, ModelInfo, Progress, WorkerSpec
from servekit.protocol.tool_formats import MARKERS, THOUGHTS

_PR_SET_TIMERSLACK = 29
#: Tokens per job and step when no step time is set: still a stream, but in few messages.
BURST = 16
#: Options that need a count of the generated tokens.
COUNTED = ("crash_after_tokens", "leak_bytes_per_token")
#: The engine supports no tools and no biases, penalties or grammars, because its answer is fixed.
#: top_p and top_k are in every client's defaults and accepted: they keep the only candidate.
#: min_tokens and ignore_eos need no support, because it never ends by itself.
SERVES: tuple[Capability, ...] = (
    *("generate", "embed", "classify", "score", "tokenize", "detokenize"),
    *("logprobs", "stop_token_ids", "prompt_logprobs"),
    "adapters",
)


def _make_vector(ids: Sequence[int], size: int) -> bytes:
    """Return SHAKE-128 of the token ids as a unit vector; float32, little-endian."""
    digest = hashlib.shake_128(struct.pack(f"<{len(ids)}I", *ids)).digest(4 * size)
    numbers = [value / 2**31 - 1 for value in struct.unpack(f"<{size}I", digest)]
    length = math.hypot(*numbers) or 1.0
    return struct.pack(f"<{size}f", *(number / length for number in numbers))


def _score(ids: Sequence[int]) -> bytes:
    """Return the score of a pair, float32, little-endian: the share of the query's characters."""
    at = ids.index(0)
    query = set(ids[:at])
    return struct.pack("<f", len(query & set(ids[at + 1 :])) / (len(query) or 1))


def _classify(ids: Sequence[int]) -> bytes:
    """Return the share of letters in a text, and that of all others; float32, little-endian."""
    letters = sum(chr(one).isalpha() for one in ids) / len(ids)
    return struct.pack("<2f", letters, 1 - letters)


class EchoEngine(Engine):
    fills_context = True

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.codec = EchoCodec()
        self.vocab_size = sys.maxunicode + 1
        self._options: dict[str, Any] = spec.options
        self._runs: dict[int, Run] = {}
        self._hung = False
        self._fails = ""  # message of the error that the next step raises
        self._size: int = spec.options.get("embedding_size", 16)
        self._progress_at = time.monotonic()
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._tokens = 0
        self._counts = not spec.options.keys().isdisjoint(COUNTED)
        self._provokable = any(map(spec.options.get, ("crash_on", "hang_on", "raise_on")))
        self._leaked: list[bytes] = []
        self._grandchildren: list[subprocess.Popen[bytes]] = []
        self._segment: mmap.mmap | None = None
        self._adapters: dict[str, Transform] = {}
        self._asleep = False
        size, token_s = map(spec.options.get, ("prefix_cache_tokens", "prompt_token_s"))
        self._cache = EchoCache(size or 0, token_s or 0.0) if size or token_s else None

    def load(self, report: Report) -> ModelInfo:
        options = self._options
        for _ in range(options.get("grandchildren", 0)):
            self._grandchildren.append(subprocess.Popen(["sleep", "1000"]))
        for _ in range(options.get("escaped_grandchildren", 0)):
            escaped = subprocess.Popen(["/bin/sleep", "1000"], env={}, start_new_session=True)
            self._grandchildren.append(escaped)
        if size_bytes := options.get("shared_memory_bytes", 0):
            self._segment = _map_segment(size_bytes)
        _load_slowly(options.get("load_s", 0.0), report)
        if (code := options.get("exit_on_load")) is not None:
            os._exit(code)
        if message := options.get("load_error"):
            raise LoadError(message)
        adapters, refused = load_adapters(self.load_adapter, self.spec.adapters)
        return ModelInfo(
            max_context=self.spec.max_context or options.get("max_context", 8192),
            slots=options.get("slots", 64),
            chat=True,
            architecture="echo",
            dtype="none",
            device="cpu",
            detail="answers with the prompt",
            serves=(*SERVES, "tools") if self.spec.tool_parser in MARKERS else SERVES,
            dialect=_choose_dialect(self.spec),
            embedding_size=self._size,
            labels=("letters", "others"),
            adapters=adapters,
            refused_adapters=refused,
            sleeps=True,
            prefix_block=BLOCK if self._cache is not None and self._cache.tokens else 0,
            prefix_tokens=0 if self._cache is None else self._cache.tokens,
        )

    def identify(self, *, portable: bool = False) -> str:
        return ""  # its path is only a name

    def start(self, emit: Emit) -> None:
        self._emit = emit
        self._step_s: float = self._options.get("step_s", 0.0)
        self._slots: int = self._options.get("slots", 64)
        self._thread = threading.Thread(target=self._run_steps, name="engine", daemon=True)
        self._thread.start()

    def load_adapter(self, adapter: AdapterSpec) -> AdapterInfo:
        options = self._options
        time.sleep(options.get("adapter_load_s", 0.0))
        if self._is_meant("crash_on_adapter", adapter):
            os.kill(os.getpid(), signal.SIGKILL)
        while self._is_meant("hang_on_adapter", adapter):
            time.sleep(1)
        if self._is_meant("adapter_error", adapter):
            raise RequestError(f"the adapter {adapter.name!r} is refused, as its options say")
        kind = transform_of(adapter)
        self._adapters[adapter.name] = TRANSFORMS[kind]
        return AdapterInfo(adapter.name, "ECHO", "mixed", f"letters go through {kind}")

    def unload_adapter(self, name: str) -> None:
        del self._adapters[name]

    def sleep(self) -> None:
        time.sleep(self._options.get("sleep_s", 0.0))
        if message := self._options.get("sleep_error"):
            raise LoadError(message, permanent=False)
        self._asleep = True

    def wake(self) -> None:
        time.sleep(self._options.get("wake_s", 0.0))
        if message := self._options.get("wake_error"):
            raise LoadError(message, permanent=False)
        self._asleep = False

    def _is_meant(self, option: str, adapter: AdapterSpec) -> bool:
        """Return whether an option names the adapter, alone or with this worker's index."""
        index = self.spec.name.rpartition("/")[2]
        return self._options.get(option) in (adapter.name, f"{adapter.name}/{index}")

    def embed(self, job: EmbedJob) -> None:
        self._pool(job, [_make_vector(ids, self._size) for ids in job.inputs])

    def classify(self, job: EmbedJob) -> None:
        self._pool(job, [_score(ids) if job.types else _classify(ids) for ids in job.inputs])

    def _pool(self, job: EmbedJob, vectors: list[bytes]) -> None:
        for ids in job.inputs:
            self._misbehave_on(ids)
        if self._fails:
            self._wake_up()  # the next step raises, so nothing is emitted
            return
        self._emit([StepOutput(job.id, [], "stop", vectors=vectors)])

    def submit(self, job: Job) -> None:
        if self._asleep:
            raise EngineFailed("a job was submitted while the engine slept")
        if not job.prompt_ids:
            raise RequestError("the prompt is empty, and there is nothing to echo", param="prompt")
        if job.adapter and job.adapter not in self._adapters:
            raise RequestError(f"the adapter {job.adapter!r} is not loaded", param="model")
        self._misbehave_on(job.prompt_ids)
        run = Run(job, self._adapters[job.adapter] if job.adapter else None)
        if self._cache is not None:
            run.cached, run.unread_s = self._cache.read_prompt(job)
        short = run.limit - run.done <= BURST and not run.unread_s
        if not self._step_s and not self._hung and not self._fails and short:
            self._emit_outputs([run.take(BURST)])  # a short answer needs no thread
            return
        with self._changed:
            if not self._runs:
                self._progress_at = time.monotonic()
            self._runs[job.id] = run
            self._changed.notify()

    def cancel(self, job_id: int) -> None:
        with self._changed:
            self._runs.pop(job_id, None)

    def load_now(self) -> Load:
        with self._changed:
            age = time.monotonic() - self._progress_at if self._runs else 0.0
            running = min(len(self._runs), self._slots)
            return Load(running, len(self._runs) - running, 0.0, age)

    def close(self) -> None:
        while self._options.get("ignore_sigterm"):
            time.sleep(1)
        self._ending.set()
        self._closed = True
        self._wake_up()
        if self._thread is not None:
            self._thread.join(timeout=5)
        for child in self._grandchildren:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
                child.wait()

    # ---- the loop

    def _run_steps(self) -> None:
        _be_punctual()
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due)
                if self._closed:
                    return
            pause_s = self._step_s + self._read_prompts()
            if pause_s and self._ending.wait(pause_s):
                return
            self._run_step()

    def _is_due(self) -> bool:
        """Return whether the loop must wake up: there is a step to run, or the engine is closed."""
        return self._closed or bool(self._fails) or (bool(self._runs) and not self._hung)

    def fail_step(self) -> None:
        self._fails = TOLD_TO_FAIL
        self._wake_up()

    def _wake_up(self) -> None:
        with self._changed:
            self._changed.notify()

    def _read_prompts(self) -> float:
        """Return the time to read new prompts, in seconds, and mark them as read."""
        if self._cache is None:
            return 0.0
        with self._changed:
            runs = list(self._runs.values())[: self._slots]
            unread_s = sum(run.unread_s for run in runs)
            for run in runs:
                run.unread_s = 0.0
        return unread_s

    def _run_step(self) -> None:
        if self._fails:
            raise RuntimeError(self._fails)
        count = 1 if self._step_s else BURST
        with self._changed:
            batch = [run for run in self._runs.values() if not run.unread_s][: self._slots]
            outputs = [run.take(count) for run in batch]
            for output in outputs:
                if output.finish:
                    del self._runs[output.id]
            self._progress_at = time.monotonic()
        self._emit_outputs(outputs)

    # ---- misbehaviour

    def _misbehave_on(self, ids: list[int]) -> None:
        if not self._provokable:
            return
        options = self._options
        text = "".join(map(chr, ids))
        if (mark := options.get("crash_on")) and mark in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if (mark := options.get("raise_on")) and mark in text:
            self._fails = f"the prompt contains {mark!r}"
        if (mark := options.get("hang_on")) and mark in text:
            self._hung = True
            if options.get("hang_holding_gil"):
                ctypes.PyDLL(None).sleep(10_000)  # PyDLL keeps the GIL through the call

    def _emit_outputs(self, outputs: list[StepOutput]) -> None:
        if self._counts:
            self._count_tokens(sum(len(output.token_ids) for output in outputs))
        self._emit(outputs)

    def _count_tokens(self, tokens: int) -> None:
        self._tokens += tokens
        if leak := self._options.get("leak_bytes_per_token", 0):
            self._leaked.append(os.urandom(leak * tokens))
        limit = self._options.get("crash_after_tokens")
        if limit is not None and self._tokens >= limit:
            os.kill(os.getpid(), signal.SIGKILL)


def _be_punctual() -> None:
    """Set this thread's timer slack to 1 ns: Linux may delay wake-ups by 50 µs, longer than a step.

    Source: prctl(2), PR_SET_TIMERSLACK.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))


def _map_segment(size_bytes: int) -> mmap.mmap:
    """Map a file in /dev/shm, as engines with shared tensors do; a SIGKILL leaves it behind."""
    path = f"/dev/shm/servekit-echo-{os.getpid()}-{secrets.token_hex(4)}"
    with open(path, "w+b") as file:  # noqa: PTH123  (no path of the user's)
        file.truncate(size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)


def _choose_dialect(spec: WorkerSpec) -> Dialect:
    """Return the configured dialect: an echoed prompt may contain tool calls or thoughts."""
    tools = spec.tool_parser if spec.tool_parser in MARKERS else ""
    begin, end = THOUGHTS.get(spec.reasoning_parser, ("", ""))
    return Dialect(tools=tools, think_begin=begin, think_end=end)


def _load_slowly(load_s: float, report: Report, steps: int = 20) -> None:
    for step in range(steps if load_s else 0):
        report(Progress("load", step, steps, "steps"))
        time.sleep(load_s / steps)
