"""Tokens/s of SmolLM2 on the CPU with n-gram proposals, beside the same without.

    python -m tests.bench.speculative [--streams 1 4] [--rounds 5] [--tokens 4] [--quick]
    python -m tests.bench.speculative --llamacpp F16 [--draft]

Two requests, greedy: to repeat a file of code with a class renamed (the answer's beginning is
given, which a model of this size needs), and to tell a story. Both ways are loaded in one process,
with one thread, and take turns; the ratio is that of the medians, with the least and the most of
the rounds' own ratios. Seconds are those of CPU time, which other work on the machine disturbs less
than a clock. Texts are compared token by token. Only decoding is measured: from the moment that all
requests have their first token.

`--llamacpp` has the engine llamacpp run it, with the weights in another format of GGUF; with
`--draft` the file as it is (Q4_1) makes the proposals. What pays is then measured at the load, by
the clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from servekit.engines.api.base import Job
from servekit.engines.llamacpp.engine import LlamaCppEngine
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.model_files.source import resolve_file
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers import loading
from servekit.protocol.messages import SamplingParams
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
    parser.add_argument("--llamacpp", metavar="FORMAT", help="as gguf names it: Q4_0, F16")
    parser.add_argument("--draft", action="store_true", help="with --llamacpp")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        asked.streams, asked.rounds, asked.length = [1], 1, 40
    with tempfile.TemporaryDirectory() as folder:
        if asked.llamacpp is None:
            compare(asked, *load_transformers(asked.tokens))
        else:
            compare(asked, *load_llamacpp(asked, Path(folder)))


Ways = tuple[list[Any], Callable[[str], list[int]], Callable[..., Any]]


def load_transformers(tokens: int) -> Ways:
    """Return the runners without and with proposals, the tokenizer, and what makes a row."""
    speculative = {"method": "ngram", "tokens": tokens}
    ways = [
        loading.load_from_spec(make_spec(SMOLLM2, options=options), lambda progress: None)
        for options in ({}, {"speculative": speculative})
    ]
    return [way.runner for way in ways], ways[0].tokenizer.encode, make_row


def load_llamacpp(asked: argparse.Namespace, folder: Path) -> Ways:
    """Return the same for llama.cpp."""
    original = resolve_file(SMOLLM2, None, lambda progress: None)
    path = folder / f"{asked.llamacpp}.gguf"
    convert(original, path, gguf.GGMLQuantizationType[asked.llamacpp])
    speculative: dict[str, Any] = {"method": "ngram", "tokens": asked.tokens}
    if asked.draft:
        speculative |= {"method": "draft", "model": str(original)}
    engines = []
    for options in ({}, {"speculative": speculative}):
        known = {"slots": max(asked.streams), "threads": 1, **options}
        engines.append(LlamaCppEngine(make_spec(path, engine="llamacpp", options=known)))
        print(engines[-1].load(lambda progress: None).detail)

    def make_llama_row(name: str, prompt: list[int], length: int) -> LlamaRow:
        job = Job(0, prompt, SamplingParams(max_tokens=length))
        return LlamaRow(name, job, Sampling(temperature=0.0), frozenset(), length)

    runners = [engine._runner for engine in engines]
    return runners, engines[0].codec.encode, make_llama_row


def convert(source: Path, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write a GGUF file with its matrices in another format."""
    reader: Any = gguf.GGUFReader(source)
    writer: Any = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value = field.contents()
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(
    asked: argparse.Namespace,
    runners: list[Any],
    encode: Callable[[str], list[int]],
    make: Callable[..., Any],
) -> None:
    print("request    streams  plain tok/s  with, tok/s   ratio            accepted  same text")
    for name, text in PROMPTS.items():
        for streams in asked.streams:
            speeds: list[list[float]] = [[], []]
            texts: list[list[list[int]]] = [[], []]
            guessing = runners[1]
            before = guessing.speculated
            for turn in range(1 + asked.rounds):
                for at, runner in enumerate(runners):
                    rows = [
                        make(f"{name}{turn}.{one}", encode(text), asked.length)
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
