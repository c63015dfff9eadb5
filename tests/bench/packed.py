"""A forward pass on the CPU with the weights as they are, and packed (`engines.packed_linear`).

    python -m tests.bench.packed [--threads 1 2] [--dtypes float32 bfloat16] [--model FOLDER]

By default SmolLM2-135M-Instruct, which a start of configs/demo.yaml has left in the cache. `rows`
are requests that bring one token each; `prompt` is one of so many tokens. Both are timed by turns
in one process, as the median of so many rounds, with logits after every token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from servekit.engines.transformers import packed_linear
from tests.bench.figures import conditions
from tests.bench.table import Figure, markdown, spread
from tests.bench.transformers_serve import cached_model
from tests.unit.engines.harness import make_spec

ROWS = (1, 2, 4, 8, 16, 32)
PROMPT_TOKENS = 256


def _model(folder: Path, dtype: str, *, packed: bool) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    options = {"packed_weights": packed}
    packed_linear.pack_layers(model, make_spec(folder, device="cpu", options=options))
    return model


def _figures(folder: Path, dtype: str, threads: int, rounds: int) -> Iterator[Figure]:
    torch.set_num_threads(threads)
    models = [_model(folder, dtype, packed=packed) for packed in (False, True)]
    inputs = {f"{rows} rows": _ids(rows, 1) for rows in ROWS}
    inputs[f"prompt of {PROMPT_TOKENS}"] = _ids(1, PROMPT_TOKENS)
    for what, ids in inputs.items():
        plain_s, packed_s = _by_turns(models, ids, rounds)
        shares = [packed / plain for packed, plain in zip(packed_s, plain_s, strict=True)]
        plain_ms, packed_ms = (1000 * statistics.median(taken) for taken in (plain_s, packed_s))
        yield Figure(
            f"{dtype}, {threads} threads, {what}",
            f"{statistics.median(shares):.2f}; by round {spread(shares)}",
            how=f"{packed_ms:.1f} ms packed, {plain_ms:.1f} as they are",
        )


def _ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(1000, 40000, (rows, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _by_turns(models: Sequence[Callable[..., Any]], ids: Tensor, rounds: int) -> list[list[float]]:
    """Seconds of each round, by model; the first round does not count."""
    taken: list[list[float]] = [[] for _ in models]
    for _ in range(rounds + 1):
        for model, seconds in zip(models, taken, strict=True):
            began = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            seconds.append(time.perf_counter() - began)
    return [seconds[1:] for seconds in taken]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.packed", description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    folder = options.model or cached_model()
    rows = [
        figure
        for dtype in options.dtypes
        for threads in options.threads
        for figure in _figures(folder, dtype, threads, options.rounds)
    ]
    print(f"{conditions()}\n\n{markdown(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
