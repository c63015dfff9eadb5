"""vLLM's own `LLM.generate`, in a process of its own that is asked by lines.

`Offline` starts it; each question is a list of prompts as token ids, all at once in the engine, and
its answer how long they took. vLLM writes on stdout too: answers have a mark before them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

_MARK = "ANSWER "
#: It is killed where loading takes longer, and what it wrote is told.
LOAD_S = 150.0


class Question(msgspec.Struct, frozen=True):
    prompts: list[list[int]]
    output: int
    temperature: float


class Offline:
    """The process; entered, it has loaded."""

    def __init__(self, arguments: dict[str, Any], log: Path, gpu: int | None = None) -> None:
        """`arguments` are `vllm.LLM`'s; with `gpu`, it sees this GPU only."""
        command = [sys.executable, "-m", "tests.bench.offline"]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(arguments).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}),
                start_new_session=True,
            )

    def __enter__(self) -> Offline:
        late = threading.Timer(LOAD_S, self._kill)
        late.start()
        try:
            self._hear()
        except BaseException:
            self._kill()
            raise
        finally:
            late.cancel()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def seconds(self, prompts: Sequence[list[int]], output: int, temperature: float = 1.0) -> float:
        """How long it takes to answer all, with so many tokens each."""
        assert self._process.stdin is not None
        question = msgspec.json.encode(Question(list(prompts), output, temperature)).decode()
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return float(self._hear())

    def _hear(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return line.removeprefix(_MARK)
        raise RuntimeError(f"vLLM ended:\n{self._log.read_text(errors='replace')[-6000:]}")


def main() -> int:
    from vllm import LLM, SamplingParams

    llm = LLM(**msgspec.json.decode(sys.argv[1]))
    print(f"{_MARK}0", flush=True)
    for line in sys.stdin:
        question = msgspec.json.decode(line, type=Question)
        params = SamplingParams(
            temperature=question.temperature, max_tokens=question.output, ignore_eos=True
        )
        prompts = [{"prompt_token_ids": ids} for ids in question.prompts]
        began = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        took_s = time.perf_counter() - began
        assert all(len(one.outputs[0].token_ids) == question.output for one in answers)
        print(f"{_MARK}{took_s}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
