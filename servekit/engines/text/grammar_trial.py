"""Trial compilation of grammars in a process that can be killed.

Some grammars of 40 bytes take a minute and gigabytes to compile, and end in an abort, which no
limit of llguidance prevents. So a worker tries each new grammar in a trial process before it
compiles the grammar itself. That process is a fresh interpreter, which has never touched a device;
it is started for the first grammar and kept. It forks for each trial, so that a trial inherits the
vocabulary and can be killed by its own limits of CPU time and memory without other damage.

    worker ──(socket of one trial)──▶ trial process ──fork──▶ trial: compiles, answers, exits

A trial first has a short turn; one that needs more takes a longer second turn, and only one second
turn runs at a time. So many explosive grammars delay ordinary ones by their short turns only.

The trial process ends with the worker: it is in the worker's process group, and sees the end of its
socket.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from servekit.errors import ModelUnavailable, RequestError
from servekit.protocol.types import Grammar
from servekit.system.parent_death import die_with
from servekit.system.rlimits import cap_by_hard_limit

if TYPE_CHECKING:
    from llguidance import LLTokenizer

#: CPU time of a trial, in s: the first turn, of which ordinary grammars need a tenth, and the
#: second turn, after which the grammar is refused.
TURNS_S = (0.06, 1.5)
#: Concurrent trials in their first turn.
FIRST_TURNS = 2
#: Trials that may wait for their second turn; beyond that the worker is busy.
MOST_WAITING = 8
#: Memory limit of a trial, in addition to the vocabulary.
MEMORY_BYTES = 256 * 2**20
#: Memory limit of a compiled grammar.
KEPT_BYTES = 32 * 2**20
#: Stack of a trial: half of a worker thread's stack, so that an overflow happens in the trial.
STACK_BYTES = 4 * 2**20
#: Wall-clock time in which a trial must get its CPU time, unless the answer has begun.
PATIENCE_S = 30.0
RETRY_AFTER_S = 5.0
#: Nice value of a second turn, so that it disturbs nothing else.
NICE = 10
#: Parts of a JSON schema that may take long to compile; named in the refusal.
_SUSPECTS = (
    *("multipleOf", "pattern", "patternProperties", "minLength", "maxLength", "minItems"),
    *("maxItems", "minProperties", "maxProperties", "enum", "allOf", "anyOf", "oneOf", "$ref"),
)


class Vocabulary(msgspec.Struct):
    """The vocabulary of the trial process's tokenizer; special tokens begin with the byte 0xff."""

    tokens: list[bytes]
    eos: list[int]

    @classmethod
    def from_tokenizer(cls, tokenizer: LLTokenizer) -> Vocabulary:
        special, spell = tokenizer.is_special_token, tokenizer.decode_bytes
        tokens = [
            b"\xff" + spell([token]) if special(token) else spell([token])
            for token in range(tokenizer.vocab_size)
        ]
        # before llguidance 1.4 there is one such token
        return cls(tokens, list(getattr(tokenizer, "eos_tokens", [tokenizer.eos_token])))


class _Order(msgspec.Struct):
    """The grammar of a trial, its CPU time and its nice value."""

    grammar: Grammar
    cpu_s: float
    nice: int


class Verdict(msgspec.Struct):
    """The result of a trial: the text of a refusal, or the memory that the compiled grammar keeps.

    `signal` is the signal that killed the trial, if any.
    """

    refusal: str = ""
    kept_bytes: int = 0
    signal: int = 0


class Trials:
    """The trial process of one vocabulary, started on demand; thread-safe."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: _Process | None = None
        self._starting = threading.Lock()
        self._first_turns = threading.BoundedSemaphore(FIRST_TURNS)
        self._second_turn = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0

    @property
    def trial_pid(self) -> int | None:
        """Process id of the trial process; None if it was not needed yet."""
        return None if self._process is None else self._process.pid

    def try_grammar(self, grammar: Grammar, *, patient: bool) -> Verdict:
        """Try a grammar and return the verdict; blocks.

        Raises ModelUnavailable if too many others are waiting, unless `patient`.
        """
        patience_s = None if patient else PATIENCE_S
        with self._first_turns:
            verdict = self._try_grammar(grammar, patience_s, TURNS_S[0])
        if verdict.signal != signal.SIGPROF:
            return verdict
        with self._counting:
            if self._waiting >= MOST_WAITING and not patient:
                raise _busy_error(grammar)
            self._waiting += 1
        try:
            with self._second_turn:
                return self._try_grammar(grammar, patience_s, TURNS_S[1], NICE)
        finally:
            with self._counting:
                self._waiting -= 1

    def _try_grammar(
        self, grammar: Grammar, patience_s: float | None, cpu_s: float, nice: int = 0
    ) -> Verdict:
        order = msgspec.msgpack.encode(_Order(grammar, cpu_s, nice))
        for _ in range(2):  # if the trial process itself was killed, the grammar is not to blame
            process = self._running_process(grammar)
            try:
                if answer := process.run_trial(order, patience_s):
                    return msgspec.msgpack.decode(answer, type=Verdict)
            except TimeoutError:
                raise _busy_error(grammar) from None
        raise _busy_error(grammar)

    def _running_process(self, grammar: Grammar) -> _Process:
        with self._starting:
            if self._process is None or not self._process.alive:
                try:
                    self._process = _Process(Vocabulary.from_tokenizer(self._tokenizer))
                except OSError as error:
                    raise _busy_error(grammar) from error
                weakref.finalize(self, self._process.close_and_wait)
            return self._process


class _Process:
    """A handle of the running trial process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Start the process. Raises OSError if it cannot be started."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, _anonymous_file(msgspec.msgpack.encode(vocabulary)) as words:
                fds = (theirs.fileno(), words.fileno())
                self._child = subprocess.Popen(
                    [
                        *(sys.executable, *(["-P"] if sys.flags.safe_path else [])),
                        *("-m", "servekit.engines.text.grammar_trial", *map(str, fds)),
                    ],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=fds,
                )
        except OSError:
            self._orders.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def run_trial(self, order: bytes, patience_s: float | None) -> bytes:
        """Return a trial's answer; empty if this process has died. Raises TimeoutError."""
        mine, its = socket.socketpair()
        with mine:
            mine.settimeout(patience_s)
            with its, _anonymous_file(order) as file:
                try:
                    socket.send_fds(self._orders, [b"t"], [its.fileno(), file.fileno()])
                except OSError:
                    return b""
            parts = []
            while part := mine.recv(65536):
                parts.append(part)
            return b"".join(parts)

    def close_and_wait(self) -> None:
        """Close the socket, at which the process ends, and wait for it; kill it if it is late."""
        self._orders.close()
        try:
            self._child.wait(2.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _busy_error(grammar: Grammar) -> ModelUnavailable:
    return ModelUnavailable(
        "the worker is busy with grammars of other requests; try again later",
        param=grammar.param,
        retry_after_s=RETRY_AFTER_S,
    )


def explain_verdict(verdict: Verdict, grammar: Grammar) -> str:
    """Return why the grammar of a killed trial is refused, as the end of a sentence."""
    if verdict.signal == signal.SIGPROF:
        reason = f"compiling it takes more than {TURNS_S[-1]:g} s"
    else:
        reason = f"compiling it takes more than {MEMORY_BYTES // 2**20} MiB or overflows the stack"
    suspects = [f'"{name}"' for name in _SUSPECTS if f'"{name}"' in grammar.text]
    return f"{reason}; look at its {', '.join(suspects)}" if suspects else reason


def _anonymous_file(content: bytes) -> BinaryIO:
    """Create an anonymous file for another process."""
    file = os.fdopen(os.memfd_create("servekit-grammars", os.MFD_CLOEXEC), "w+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


# ---------------------------------------------------------------- the trial process


def serve_trials(orders: socket.socket, tokenizer: LLTokenizer) -> None:
    """Fork a trial for each received socket, until the worker is gone."""
    trials: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    worker = os.getppid()
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        while os.getppid() == worker:
            for key, _ in selector.select(1.0):
                if key.fileobj is not orders:
                    selector.unregister(key.fd)
                    _reap_trial(key.fd, *trials.pop(key.fd))
                    continue
                _, descriptors, _, _ = socket.recv_fds(orders, 1, 2)
                if not descriptors:
                    return
                end, order = socket.socket(fileno=descriptors[0]), os.fdopen(descriptors[1], "rb")
                with order:
                    child = os.fork()
                    if not child:
                        _be_tried(end, order, tokenizer)
                pidfd = os.pidfd_open(child)
                trials[pidfd] = (child, end)
                selector.register(pidfd, selectors.EVENT_READ)


def _reap_trial(pidfd: int, child: int, end: socket.socket) -> None:
    """Reap a trial; report its signal if it was killed, as otherwise it has sent its own answer."""
    os.close(pidfd)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with end, contextlib.suppress(OSError):
        if status:
            end.sendall(msgspec.msgpack.encode(Verdict(signal=max(-status, 1))))


def _be_tried(end: socket.socket, file: BinaryIO, tokenizer: LLTokenizer) -> None:
    """Run one trial in this forked process, and exit."""
    status = 1
    try:
        from servekit.engines.text.structured_output import compile_grammar

        order = msgspec.msgpack.decode(file.read(), type=_Order)
        _limit_resources(order)
        verdict = _judge_compilation(lambda: compile_grammar(tokenizer, order.grammar))
        end.sendall(msgspec.msgpack.encode(verdict))
        status = 0
    finally:
        os._exit(status)


def _judge_compilation(compile_it: Callable[[], Any]) -> Verdict:
    before = _resident_bytes()
    try:
        compiled = compile_it()
    except RequestError as error:
        return Verdict(str(error))
    kept = _resident_bytes() - before
    del compiled
    return Verdict(kept_bytes=max(0, kept))


def _limit_resources(order: _Order) -> None:
    """Set the resource limits of this process, at which the kernel kills it."""
    die_with(os.getppid())
    os.nice(order.nice)
    with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # an abort's message contains text of the request
    size = _statm_bytes(0) + MEMORY_BYTES
    for limit, value in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        capped = cap_by_hard_limit(limit, value)
        resource.setrlimit(limit, (capped, capped))
    signal.setitimer(signal.ITIMER_PROF, order.cpu_s)


def _resident_bytes() -> int:
    return _statm_bytes(1)


def _statm_bytes(field: int) -> int:
    """Return the bytes of address space (field 0) or resident memory (1). Source: proc(5)."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGESIZE")


class _Words:
    """A vocabulary in the form that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos[0]
        self._ids = {spelt: token for token, spelt in enumerate(vocabulary.tokens)}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize forced text greedily, by the longest token at each position."""
        data, ids, at = text.encode() if isinstance(text, str) else text, [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            fits = next((end for end in ends if data[at:end] in self._ids), None)
            if fits is not None:
                ids.append(self._ids[data[at:fits]])
            at = at + 1 if fits is None else fits
        return ids


def _main(orders_fd: int, words_fd: int) -> None:
    from llguidance import LLTokenizer

    from servekit.engines.text import structured_output as grammar  # imported before the first fork

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides when this process ends
    with open(words_fd, "rb") as file:
        vocabulary = msgspec.msgpack.decode(file.read(), type=Vocabulary)
    words: Any = _Words(vocabulary)
    ends: Any = vocabulary.eos if len(vocabulary.eos) > 1 else vocabulary.eos[0]
    tokenizer = LLTokenizer(words, n_vocab=len(vocabulary.tokens), eos_token=ends)
    with contextlib.suppress(RequestError):
        grammar.compile_grammar(tokenizer, Grammar("json_schema", "{}"))
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory
    gc.disable()
    with socket.socket(fileno=orders_fd) as orders:
        serve_trials(orders, tokenizer)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:3]))
