"""The same prompts on the CPU in float32 and on a GPU: how far the first token's logits differ.

    python -m tests.gpu.numerics --model PATH [--device cpu]

Each engine is loaded as a worker loads it, and read along the path that requests take: in pages,
all prompts in one batch. What the CPU says in float32 is the reference. The error is the norm of
the difference over that of the reference, both without their mean, which no softmax sees.

    device, dtype    tolerance   why
    GPU, float32     2e-4        sums in another order: float32 keeps 24 bits (6e-8), and some
                                 hundred sums of thousands of terms each add their rounding. TF32
                                 is off: it keeps 11 bits, and would show as 5e-4 and more.
    any, bfloat16    6e-2        8 bits (4e-3) of each weight and of what every layer hands on,
                                 through tens of layers
    any, float16     1.5e-2      11 bits (5e-4), the same way

Where the reference's best two logits are further apart than ten times what the tolerance lets a
logit be off by on average, the first token is the same; nearer ones rounding may decide.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from servekit.engines.api.base import Job
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.engine import TransformersEngine
from servekit.engines.transformers.request_row import Row
from servekit.protocol.messages import SamplingParams
from tests.unit.engines.harness import make_spec

PROMPTS = [
    "The history of the city begins",
    "def fibonacci(n):",
    "Größe, naïve café: 東京, Москва.",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a land far away, there lived " * 6,
    "The capital of France is",
    "SELECT name, count(*) FROM visits WHERE",
    "To be, or not to be, that is",
]
TOLERANCE = {
    ("cuda", "float32"): 2e-4,
    ("cuda", "bfloat16"): 6e-2,
    ("cuda", "float16"): 1.5e-2,
    ("cpu", "bfloat16"): 6e-2,
    ("cpu", "float16"): 1.5e-2,
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One device and dtype against the CPU in float32, the worst of all prompts."""

    device: str
    dtype: str
    error: float
    tolerance: float
    prompts: int
    same_token: int
    decided: int  # prompts whose best logit leads by more than rounding may take
    decided_same: int

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance and self.decided == self.decided_same


def first_logits(path: str, device: str, dtype: str) -> Tensor:
    """Logits of each prompt's first new token, float32 on the CPU: [prompts, vocabulary]."""
    options = {"kv_cache_bytes": 2**28}
    spec = make_spec(path, device=device, dtype=dtype, max_context=512, options=options)
    engine = TransformersEngine(spec)
    engine.load(lambda progress: None)
    runner = engine._runner
    assert isinstance(runner, ContinuousRunner)
    rows = []
    for number, prompt in enumerate(PROMPTS):
        job = Job(-number - 1, engine.codec.encode(prompt), SamplingParams(max_tokens=1))
        rows.append(Row(f"numerics{number}", job, Sampling(temperature=0.0), frozenset(), 1))
    seen = runner.logits_of(rows)
    return torch.stack([seen[row.key][0] for row in rows]).float().cpu()


def compare(reference: Tensor, found: Tensor, device: str, dtype: str) -> Compared:
    """Both [prompts, vocabulary]."""
    tolerance = TOLERANCE[device, dtype]
    centred = reference - reference.mean(-1, keepdim=True)
    difference = found - found.mean(-1, keepdim=True) - centred
    errors = difference.norm(dim=-1) / centred.norm(dim=-1)
    best = reference.topk(2, dim=-1)
    lead = best.values[:, 0] - best.values[:, 1]
    # Errors of single logits spread around the mean one; five times that is far out, for both.
    decided = lead > 2 * 5 * tolerance * centred.square().mean(-1).sqrt()
    same = found.argmax(-1) == best.indices[:, 0]
    return Compared(
        device,
        dtype,
        float(errors.max()),
        tolerance,
        len(reference),
        int(same.sum()),
        int(decided.sum()),
        int((same & decided).sum()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.numerics")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    wish = parser.parse_args()
    path = str(Path(wish.model).resolve()) if Path(wish.model).exists() else wish.model
    reference = first_logits(path, "cpu", "float32")
    found = [
        compare(reference, first_logits(path, device, dtype), device, dtype)
        for device, dtype in TOLERANCE
        if device == wish.device
    ]
    for one in found:
        print(json.dumps(asdict(one)))
    return 0 if all(one.ok for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
