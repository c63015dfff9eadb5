"""Ways to run a few long prompts at once, each in a process of its own that is asked by lines.

`ours` is servekit's transformers engine, `generate` the library's `model.generate` over one batch
that everybody waits for, `batching` its own continuous batching, on which `generate_batch` runs.
`started` starts one; each question is a list of prompts as token ids, its answer when each prompt
had its first and its last token. Libraries write on stdout, too: answers have a mark before them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from tests.bench import peers

_MARK = "ANSWER "
#: The library's default page. Its default number of them takes 6 GB here.
PAGE_TOKENS = 256
#: Without a token for so long, something is wrong.
LIMIT_S = 300.0


class Setting(msgspec.Struct, frozen=True):
    """How a way is run; `room` is the tokens that all prompts and answers take."""

    way: str
    model: str
    threads: int
    room: int
    batch_tokens: int  # of the library's continuous batching, in one pass


class Question(msgspec.Struct, frozen=True):
    prompts: list[list[int]]
    output: int


class Answer(msgspec.Struct, frozen=True):
    """By prompt; times are seconds since all were asked."""

    first_s: list[float]
    last_s: list[float]
    tokens: list[list[int]]


Ask = Callable[[Question], Answer]


class Way:
    """A running process of one way; entered for each of its turns."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log
        self.peer = peers.Peer("", process.pid)

    def ask(self, question: Question) -> Answer:
        with self.peer.turn():
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
            return msgspec.json.decode(self.hear(), type=Answer)

    def hear(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK.encode()):
                return line.decode().removeprefix(_MARK)
        raise RuntimeError(f"it ended:\n{self._log.read_text(errors='replace')[-6000:]}")


@contextmanager
def started(setting: Setting, log: Path) -> Iterator[Way]:
    """A way that has loaded its model; killed in the end."""
    command = (sys.executable, "-m", "tests.bench.long_prompts_ways")
    environ = {**os.environ, "OMP_NUM_THREADS": str(setting.threads), "HF_HUB_OFFLINE": "1"}
    told = msgspec.json.encode(setting).decode()
    with peers.started((*command, told), log, environ, talks=True) as process:
        way = Way(process, log)
        way.hear()
        way.peer.rest()
        yield way


# ---------------------------------------------------------------- in the process


class Clock:
    """When each prompt had which tokens."""

    def __init__(self, question: Question, now: Callable[[], float] = time.perf_counter) -> None:
        self._output = question.output
        self._tokens: list[list[int]] = [[] for _ in question.prompts]
        self._first_s = [0.0] * len(question.prompts)
        self._last_s = [0.0] * len(question.prompts)
        self._now, self._began = now, now()

    def tell(self, brought: Iterable[tuple[int, list[int]]]) -> None:
        """Tokens that have just come, beside which prompt they are."""
        passed = self._now() - self._began
        for at, tokens in brought:
            if tokens and not self._tokens[at]:
                self._first_s[at] = passed
            self._last_s[at] = passed
            self._tokens[at] += tokens

    @property
    def done(self) -> bool:
        return all(len(tokens) >= self._output for tokens in self._tokens)

    def answer(self) -> Answer:
        """Raises RuntimeError if a prompt has another number of tokens than was asked for."""
        counts = [len(tokens) for tokens in self._tokens]
        if set(counts) != {self._output}:
            raise RuntimeError(f"{counts} tokens, where {self._output} were asked for")
        return Answer(self._first_s, self._last_s, self._tokens)


def _ours(setting: Setting) -> Ask:
    """With the options that it has by itself."""
    from servekit.engines.api.base import Job, StepOutput
    from servekit.engines.transformers.engine import TransformersEngine
    from servekit.protocol.messages import SamplingParams
    from tests.unit.engines.harness import make_spec

    engine = TransformersEngine(make_spec(setting.model, options={"threads": setting.threads}))
    engine.load(lambda progress: None)
    heard: SimpleQueue[Sequence[StepOutput]] = SimpleQueue()
    engine.start(heard.put)

    def ask(question: Question) -> Answer:
        clock = Clock(question)
        params = SamplingParams(max_tokens=question.output, temperature=0.0, ignore_eos=True)
        for at, prompt in enumerate(question.prompts):
            engine.submit(Job(at, prompt, params, []))
        while not clock.done:
            outputs = heard.get(timeout=LIMIT_S)
            clock.tell([(output.id, output.token_ids) for output in outputs])
        return clock.answer()

    return ask


def _model(setting: Setting) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setting.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32)
    return model.eval()


def _generate(setting: Setting) -> Ask:
    import torch
    from transformers.generation.streamers import BaseStreamer

    model = _model(setting)

    class Listener(BaseStreamer):
        """Called with the prompts, and then with each step's tokens, one of each prompt."""

        def __init__(self, clock: Clock) -> None:
            self._clock, self._read = clock, False

        def put(self, value: Any) -> None:
            if self._read:
                self._clock.tell((at, [token]) for at, token in enumerate(value.tolist()))
            self._read = True

        def end(self) -> None:
            pass

    def ask(question: Question) -> Answer:
        clock = Clock(question)
        longest = max(map(len, question.prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in question.prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in question.prompts]
        model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            streamer=Listener(clock),
            max_new_tokens=question.output,
            do_sample=False,
            eos_token_id=-1,  # it goes on after an end
            pad_token_id=0,
        )
        return clock.answer()

    return ask


def _batching(setting: Setting) -> Ask:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    greedy: Any = GenerationConfig  # untyped in the library
    manager = _model(setting).init_continuous_batching(
        generation_config=greedy(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=setting.room // PAGE_TOKENS + 16,
            max_batch_tokens=setting.batch_tokens,
            auto_switch_to_flash=False,  # or it asks the hub for one
        ),
    )
    manager.start()

    def ask(question: Question) -> Answer:
        clock = Clock(question)
        wanted = {"max_new_tokens": question.output, "streaming": True, "eos_token_id": -1}
        keys = [manager.add_request(prompt, **wanted) for prompt in question.prompts]
        seen = dict.fromkeys(keys, 0)
        while not clock.done:
            result = manager.get_result(timeout=LIMIT_S)
            if result is None or result.error:
                raise RuntimeError(f"no result: {result}")
            key, tokens = result.request_id, result.generated_tokens  # all so far
            clock.tell([(keys.index(key), tokens[seen[key] :])])
            seen[key] = len(tokens)
        return clock.answer()

    return ask


WAYS: dict[str, Callable[[Setting], Ask]] = {
    "ours": _ours,
    "generate": _generate,
    "batching": _batching,
}


def main() -> int:
    setting = msgspec.json.decode(sys.argv[1], type=Setting)
    ask = WAYS[setting.way](setting)
    print(_MARK, flush=True)
    for line in sys.stdin:
        answer = ask(msgspec.json.decode(line, type=Question))
        print(_MARK + msgspec.json.encode(answer).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
