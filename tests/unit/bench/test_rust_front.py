"""The benchmark beside vLLM's Rust front end: its pace, its engine core, and the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.bench.paced import MARK, Pace, read_answer, read_words
from tests.bench.rust_core import Core
from tests.bench.rust_front import NUMBER, OURS, THEIRS, Row, Texts, ratio
from tests.polling import poll
from tests.unit.engines.harness import write_tiny_llama

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.bench.rust_front"]

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


def test_each_request_gets_its_tokens_and_no_more() -> None:
    pace = Pace([7, 8, 9])
    pace.add("a", 2)
    assert pace.step() == [("a", 7, False)]
    pace.add("b", 4)
    assert pace.step() == [("a", 8, True), ("b", 7, False)]
    pace.drop("b")
    pace.drop("a")
    assert pace.step() == []
    pace.add("c", 5, done=4)
    assert pace.step() == [("c", 8, True)], "it goes on where another left off"


class Socket:
    """A ZMQ socket: what is to be received, and what has been sent."""

    def __init__(self) -> None:
        self.coming: deque[list[bytes]] = deque()
        self.sent: list[Any] = []

    def poll(self, timeout: int) -> int:
        return len(self.coming)

    def recv_multipart(self) -> list[bytes]:
        return self.coming.popleft()

    def send(self, data: bytes) -> None:
        self.sent.append(decode(data))


def test_the_core_speaks_as_vllms() -> None:
    requests, answers = Socket(), Socket()
    core = Core([7, 8], requests, answers)
    (ready,) = requests.sent
    assert {"max_model_len", "num_gpu_blocks", "dtype", "vllm_version"} <= set(ready)
    for key, tokens in (("one", 1), ("two", 2), ("gone", 9)):
        asked = [key, [1, 2, 3], None, {"temperature": 0.0, "max_tokens": tokens}, None, 0.5]
        requests.coming.append([b"\x00", encode(asked)])
    requests.coming.append([b"\x01", encode(["gone"])])
    requests.coming.append([b"\x03", encode([0, 77, "get_supported_tasks", []])])
    core.take_all()
    core.step()
    core.step()
    core.step()
    call, at_once, first, last = answers.sent
    assert call[4][:2] == [77, None]
    assert [one[1] for one in (at_once, first, last)] == [
        [["one", [7], None, None, None, 1]],
        [["two", [7]]],
        [["two", [8], None, None, None, 1]],
    ]


def test_texts_have_their_place_for_a_number_and_are_all_unlike(model: Path) -> None:
    texts = Texts(list(read_words(model)))
    made = texts.make(50, 40)
    assert len(set(made)) == 50
    assert all(text.startswith(f"{NUMBER} ") and text.count(NUMBER) == 1 for text in made)
    assert not any(NUMBER in text for text in texts.make(5, 40, numbered=False))


def test_answers_are_words_with_one_mark(model: Path) -> None:
    words = {token: word for word, token in read_words(model).items()}
    answer = read_answer(model)
    assert answer
    assert all(f" {words[token]}".count(MARK) == 1 for token in answer)


def test_a_ratio_is_of_the_medians() -> None:
    row = Row("what", "µs", {OURS: [1.0, 9.0, 2.0], THEIRS: [4.0, 4.0, 1.0]})
    assert ratio(row, OURS) == "0.50"
    assert ratio(Row("what", "µs", {OURS: [1.0]}), OURS) == ""


@pytest.mark.lane("bench")
def test_it_prints_a_table_without_the_peer(model: Path) -> None:
    sizes = ["--streams", "1", "3", "--at-once", "3", "--seconds", "0.3", "--rounds", "1"]
    only = ["--only", "requests", "varied", "first", "tokens", "idle"]
    rest = ["--settle", "0", "--idle", "0.5"]
    done = subprocess.run(
        [*COMMAND, "--model", str(model), *sizes, *only, *rest],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    cells = {row[0].removeprefix("| "): row[1] for row in rows}
    for what in (
        "CPU of a completion, always the same",
        "CPU of a chat, no text, key or head twice",
        "first token, p99, 3 chats at once",
        "CPU of a chat token, 3 streams",
        "CPU at rest",
    ):
        assert float(cells[what].split()[0]) > 0, done.stdout
    assert float(cells["… tokens/s, 3 streams"].split()[0]) == pytest.approx(300, rel=0.3)


@pytest.mark.lane("bench")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_it_leaves_no_process_behind(model: Path, how: signal.Signals) -> None:
    command = [*COMMAND, "--model", str(model), "--only", "idle", "--settle", "600"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "resting" in process.stderr.readline()
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) > 3, "servekit and the bare writer"
            os.kill(process.pid, how)
            process.wait(timeout=30)
            poll("they have ended", lambda: not psutil.wait_procs(started, timeout=0.1)[1], 10)
        finally:
            process.kill()
