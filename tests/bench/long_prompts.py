"""servekit's transformers engine against the library itself, on long prompts that come all at once.

    python -m tests.bench.long_prompts [--rounds 5] [--prompts 8] [--tokens 800] [--output 32]

SmolLM2-135M-Instruct on the CPU in float32 from one safetensors folder, which a start of
configs/demo.yaml has left in the cache. Each way (`long_prompts_ways`) has a process of its own, in
which no server is in between, and is stopped while another has its turn. Greedy, and past an end of
sequence; prompts are random tokens, others in each round, so that nothing is in a prefix cache.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.bench.contest import Plan
from tests.bench.cpu import await_calm
from tests.bench.figures import conditions
from tests.bench.long_prompts_ways import WAYS, Answer, Question, Setting, Way, started
from tests.bench.table import Figure, markdown, spread
from tests.bench.transformers_serve import cached_model

#: Tokens of the vocabulary that are neither special nor a single byte.
PLAIN = range(1000, 49000)
NAMES = {"generate": "`model.generate`, one batch", "batching": "its continuous batching"}

Rounds = Mapping[str, Sequence[Answer]]


def questions(rounds: int, prompts: int, tokens: int, output: int) -> list[Question]:
    """The same ones in every run, and no two prompts alike."""
    source = random.Random(1)
    return [
        Question([source.choices(PLAIN, k=tokens) for _ in range(prompts)], output)
        for _ in range(rounds)
    ]


def measure(ways: Mapping[str, Way], asked: Sequence[Question], plan: Plan) -> Rounds:
    """The first question is a short one that does not count: it compiles and allocates."""
    found: dict[str, list[Answer]] = {name: [] for name in ways}
    for way in ways.values():
        way.ask(Question([prompt[::-1] for prompt in asked[0].prompts[:2]], 2))
    for at, question in enumerate(asked):
        print(f"measuring: round {at} …", file=sys.stderr, flush=True)
        for name, way in ways.items():
            await_calm(plan.calm_within_s)
            found[name].append(way.ask(question))
    return found


# ---------------------------------------------------------------- the table


def first_mean(answer: Answer) -> float:
    return statistics.mean(answer.first_s)


def first_of_all(answer: Answer) -> float:
    return min(answer.first_s)


def first_of_last(answer: Answer) -> float:
    return max(answer.first_s)


def whole(answer: Answer) -> float:
    return max(answer.last_s)


MEASURES = {
    "to the last token of all": whole,
    "to the first token, mean over the prompts": first_mean,
    "… of the prompt that has its first token last": first_of_last,
    "… of the one that has it first": first_of_all,
}
#: Where servekit has to be ahead of each, by more than noise.
AIMED = (whole, first_mean)


def figures(rounds: Rounds) -> Iterator[Figure]:
    ours = rounds["ours"]
    for name, theirs in rounds.items():
        if name == "ours":
            continue
        for what, value in MEASURES.items():
            ratios = [value(b) / value(a) for a, b in zip(ours, theirs, strict=True)]
            ratio = statistics.median(map(value, theirs)) / statistics.median(map(value, ours))
            aimed = value in AIMED
            yield Figure(
                f"{NAMES[name]}: its time {what}, as a multiple of servekit's",
                f"{ratio:.2f}; by round {spread(ratios)}",
                "> 1 in each round" if aimed else "",
                min(ratios) > 1 if aimed else None,
                f"{spread(list(map(value, ours)), 1, ' s')} against "
                f"{spread(list(map(value, theirs)), 1, ' s')}; {same(ours, theirs)}",
            )


def same(ours: Sequence[Answer], theirs: Sequence[Answer]) -> str:
    pairs = [
        a == b
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x.tokens, y.tokens, strict=True)
    ]
    return f"{sum(pairs)} of {len(pairs)} answers the same tokens"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=800, help="of each prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of every way")
    parser.add_argument("--peer-batch-tokens", type=int, default=512, help="of `batching`")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--calm-within", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    plan = Plan(options.rounds, calm_within_s=options.calm_within)
    room = options.prompts * (options.tokens + options.output)
    asked = questions(options.rounds, options.prompts, options.tokens, options.output)
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder, ExitStack() as stack:
        ways = {}
        for name in ("ours", *(way for way in options.ways if way != "ours")):
            setting = Setting(
                name, str(cached_model()), options.threads, room, options.peer_batch_tokens
            )
            ways[name] = stack.enter_context(started(setting, Path(folder) / f"{name}.log"))
        table = markdown(figures(measure(ways, asked, plan)))
    print(f"{table}\n\nAfter: {conditions()}; {options.threads} torch thread(s) each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
