"""Requests that come and go, run by the library's steps alone or by the decode path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from servekit.engines.api.base import Job, StepOutput
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.batching import kv_cache
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.decode import kernels
from servekit.engines.transformers.decode.decode_loop import StepOptions
from servekit.engines.transformers.request_row import Row
from servekit.protocol.messages import SamplingParams

REFERENCE = kernels.Kernel("reference", kernels.reference_attention, captured=False)
CONTEXT = 512
EOS = frozenset([3, 5, 7, 100])
BLOCK = 16
#: What the device chooses by itself; the tiny vocabulary is deeper than the candidates.
UNWATCHED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]
#: What the host has to look at.
WATCHED: list[dict[str, Any]] = [
    {"temperature": 1.1, "top_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_k": 9, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 9},
    {"temperature": 0.0, "logit_bias": ((11, 4.0),)},
]


def wish(*, ahead: bool) -> StepOptions:
    return StepOptions(REFERENCE, CONTEXT, graphs=False, ahead=ahead)


def runner(folder: Path, decode: StepOptions | None, blocks: int = 200) -> ContinuousRunner:
    loads: Any = AutoModelForCausalLM  # untyped in part
    model = loads.from_pretrained(folder, attn_implementation="sdpa").eval()
    plan = kv_cache.CachePlan(blocks, BLOCK, batch_tokens=256, slots=16, token_bytes=1024)
    return ContinuousRunner(model, plan, by_request=True, decode=decode)


def row(name: str, prompt: list[int], tokens: int, seed: int = 1, **how: Any) -> Row:
    job = Job(0, prompt, SamplingParams(max_tokens=tokens))
    sampling = Sampling(**{"temperature": 0.0, "seed": seed} | how)
    return Row(name, job, sampling, EOS, tokens)


@dataclass
class Crowd:
    """Rows and the steps before which they come; some of them leave early."""

    coming: list[tuple[int, Row]]
    leaving: dict[str, int] = field(default_factory=dict)  # after so many tokens

    @classmethod
    def of(cls, seed: int, count: int, hows: Sequence[dict[str, Any]], longest: int) -> Crowd:
        made = random.Random(seed)
        vocabulary = range(8, 300)
        shared = made.choices(vocabulary, k=40)
        coming = []
        for index in range(count):
            own = made.choices(vocabulary, k=made.randrange(1, 60))
            prompt = (shared if made.random() < 0.3 else []) + own
            how = hows[index % len(hows)]
            tokens = made.randrange(1, longest)
            one = row(f"r{index}", prompt, tokens, made.getrandbits(63), **how)
            coming.append((made.randrange(2 * count), one))
        return cls(sorted(coming, key=lambda pair: pair[0]))

    def run(self, engine: ContinuousRunner) -> dict[str, list[StepOutput]]:
        """All outputs by key."""
        said: dict[str, list[StepOutput]] = {one.key: [] for _, one in self.coming}
        queue, step = list(self.coming), 0
        while queue or engine.running or engine.waiting:
            while queue and queue[0][0] <= step:
                engine.add(queue.pop(0)[1])
            if engine.running or engine.waiting:
                for one, output in engine.step():
                    said[one.key].append(output)
                    if len(said[one.key]) == self.leaving.get(one.key) and not output.finish:
                        engine.cancel(one)
            step += 1
        return said


def texts(said: dict[str, list[StepOutput]]) -> dict[str, list[int]]:
    return {
        key: [token for one in outputs for token in one.token_ids] for key, outputs in said.items()
    }


def ends(said: dict[str, list[StepOutput]]) -> dict[str, str | None]:
    return {key: outputs[-1].finish for key, outputs in said.items()}
