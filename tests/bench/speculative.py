"""Tokens/s of SmolLM2 on the CPU with n-gram proposals, beside the same without.

    python -m tests.bench.speculative [--streams 1 4] [--rounds 5] [--tokens 4] [--quick]

Two requests, greedy: to repeat a file of code with a class renamed (the answer's beginning is
given, which a model of this size needs), and to tell a story. Both ways are loaded in one process,
with one thread, and take turns; the ratio is that of the medians, with the least and the most of
the rounds' own ratios. Seconds are those of CPU time, which other work on the machine disturbs less
than a clock. Texts are compared token by token. Only decoding is measured: from the moment that all
requests have their first token.
"""

from __future__ import annotations

import argparse
import statistics
import time

from servekit.engines.transformers import loading
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from tests.gpu.speculative import make_row, run_rows
from tests.unit.engines.harness import make_spec
from tests.unit.engines.origins import SMOLLM2

CODE = """\
class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance
        self.entries = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance = self.balance + amount
        self.entries.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance = self.balance - amount
        self.entries.append(("withdrawal", amount))
        return self.balance

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)

    def statement(self):
        lines = [f"{self.owner}: {self.balance}"]
        for kind, amount in self.entries:
            lines.append(f"{kind:12} {amount:8}")
        return "\\n".join(lines)
"""
_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    "code edit": _CHAT.format(
        f"Repeat this code with the class renamed to Wallet.\n```python\n{CODE}```"
    )
    + "```python\nclass Wallet:\n    def __init__(self, owner, balance):\n"
    + "        self.owner = owner\n        self.balance = balance\n        self.entries = []\n",
    "story": _CHAT.format("Tell me a story about a fox and the sea."),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--length", type=int, default=250, help="tokens of an answer")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        asked.streams, asked.rounds, asked.length = [1], 1, 40
    speculative = {"method": "ngram", "tokens": asked.tokens}
    ways = [
        loading.load_from_spec(make_spec(SMOLLM2, options=options), lambda progress: None)
        for options in ({}, {"speculative": speculative})
    ]
    runners = [way.runner for way in ways]
    tokenizer = ways[0].tokenizer
    print("request    streams  plain tok/s  n-gram tok/s  ratio            accepted  same text")
    for name, text in PROMPTS.items():
        for streams in asked.streams:
            speeds: list[list[float]] = [[], []]
            texts: list[list[list[int]]] = [[], []]
            guessing = runners[1]
            assert isinstance(guessing, ContinuousRunner)
            before = guessing.speculated
            for turn in range(1 + asked.rounds):
                for at, runner in enumerate(runners):
                    assert isinstance(runner, ContinuousRunner)
                    rows = [
                        make_row(f"{name}{turn}.{one}", tokenizer.encode(text), asked.length)
                        for one in range(streams)
                    ]
                    speed, _ = run_rows(runner, rows, time.process_time)
                    texts[at] += [row.completion for row in rows]
                    if turn:  # the first one warms up
                        speeds[at].append(speed)
            plain, other = map(statistics.median, speeds)
            ratios = [b / a for a, b in zip(*speeds, strict=True)]
            counts = guessing.speculated
            proposed = counts.draft_tokens - before.draft_tokens
            share = (counts.accepted_tokens - before.accepted_tokens) / max(1, proposed)
            told = f"{other / plain:.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            same = "yes" if texts[0] == texts[1] else "NO"
            print(
                f"{name:10} {streams:7} {plain:12.1f} {other:13.1f}  {told:16} "
                f"{share:8.0%}  {same}",
                flush=True,
            )


if __name__ == "__main__":
    main()
