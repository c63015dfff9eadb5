"""Steps in which every request brings one token: the library's, and ours with each kernel.

    python -m tests.bench.decode --model FOLDER [--requests 128 256] [--ways eager graph triton ...]
    python -m tests.bench.decode --made 0.6B          a random model of that shape, bfloat16
    python -m tests.bench.decode --quick              a tiny one on the CPU, half a minute

A way is `eager` (options.decode: eager), `graph` (whatever kernel `auto` finds), or a kernel's name
(options.decode_attention); `vllm` is `LLM.generate` of the same prompts, for its rate alone.

The runner is stepped here, without the engine's thread, so that what is told is the runner's own:
tokens/s over the whole run, prompts included; the median step that brought a token of every
request; the time until all have their first; what the device was idle of a stretch of such steps,
by the profiler's kernels; the rate of the first run after the load, as a share of the measured
one's (what it lacks is what the load did not prepare); and how many requests say what the first way
said, with the share of their tokens before the first that differs (in bfloat16 near-ties part them;
in float32, `--dtype float32`, nothing should).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from servekit.engines.api.base import Job
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers import loading
from servekit.engines.transformers.request_row import Row
from servekit.protocol.messages import SamplingParams
from tests.bench.offline import Offline
from tests.unit.engines.harness import byte_level_tokenizer, make_spec, write_tiny_llama

#: hidden, layers, heads, intermediate; all with 8 kv heads of 128 and Qwen3's vocabulary.
SHAPES = {"0.6B": (1024, 28, 16, 3072), "8B": (4096, 36, 32, 12288)}
#: Steps that the profiler looks at.
PROFILED = 20


@dataclass
class Run:
    """What one way made of so many requests."""

    way: str
    detail: str
    requests: int
    tokens_per_s: float
    first_s: float
    step_s: float
    idle: float | None
    first_run: float
    texts: list[list[int]]


def main() -> None:
    asked = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.model or _made(Path(scratch) / "model", asked.made)
        heads = ("way", "requests", "tok/s", "first s", "step ms", "idle", "1st run", "same")
        print("{:10} {:>8} {:>8} {:>8} {:>8} {:>6} {:>7}  {}".format(*heads))
        for requests in asked.requests:
            expected: list[list[int]] = []
            for way in asked.ways:
                try:
                    if way == "vllm":
                        print(f"{way:10} {requests:8} {_vllm(folder, requests, asked):8.0f}")
                        continue
                    run = _run(way, folder, requests, asked)
                except Exception as error:  # the other ways are still to be seen
                    print(f"{way:10} {requests:8} {type(error).__name__}: {error}")
                    continue
                expected = expected or run.texts
                _tell(run, expected)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--made", choices=[*SHAPES, "tiny"], default="0.6B")
    parser.add_argument("--requests", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--ways", nargs="+", default=["eager", "triton", "graph"])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        asked.made, asked.requests, asked.ways = "tiny", [4, 16], ["eager", "reference"]
        asked.prompt, asked.output, asked.dtype = 16, 48, "float32"
    return asked


def _made(folder: Path, shape: str) -> Path:
    """A random model; what it says is nonsense, and takes as long."""
    if shape == "tiny":
        folder.mkdir()
        return write_tiny_llama(folder)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, intermediate = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=151936,
        max_position_embeddings=8192,
        tie_word_embeddings=shape == "0.6B",
        initializer_range=0.05,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    del model
    return folder


def _run(way: str, folder: Path, requests: int, asked: argparse.Namespace) -> Run:
    options: dict[str, Any] = {"slots": requests, "block_size": asked.block_size}
    options["decode"] = "eager" if way == "eager" else "graph"
    if way not in ("eager", "graph"):
        options["decode_attention"] = way
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gc.collect()
    gc.freeze()  # as a worker does, whose engine is not held up for the imports' objects
    loaded = loading.load_from_spec(
        make_spec(folder, device=device, dtype=asked.dtype, max_context=2048, options=options),
        lambda progress: None,
    )
    try:
        fresh_s, _, _ = _finish(loaded.runner, _rows("fresh", requests, asked, asked.output))
        idle = _idle(loaded.runner, _rows("profiled", requests, asked, 3 * PROFILED), device)
        rows = _rows("measured", requests, asked, asked.output)
        took_s, first_s, steps = _finish(loaded.runner, rows)
        return Run(
            way,
            loaded.info.detail,
            requests,
            sum(len(row.completion) for row in rows) / took_s,
            first_s,
            statistics.median(steps) if steps else float("nan"),
            idle,
            took_s / fresh_s,
            [row.completion for row in rows],
        )
    finally:
        loaded.runner.close()
        del loaded
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _vllm(folder: Path, requests: int, asked: argparse.Namespace) -> float:
    """Tokens/s of vLLM's own, offline: the second of two rounds."""
    arguments = {"model": str(folder), "dtype": asked.dtype, "max_model_len": 2048}
    arguments |= {"max_num_seqs": requests, "gpu_memory_utilization": 0.4}
    took_s = 0.0
    log = folder.with_suffix(".log")
    with Offline(arguments, log) as offline:
        for name in ("warm", "measured"):
            prompts = [
                list(row.job.prompt_ids) for row in _rows(name, requests, asked, asked.output)
            ]
            took_s = offline.seconds(prompts, asked.output, asked.temperature)
    return float(requests * asked.output / took_s)


def _rows(name: str, count: int, asked: argparse.Namespace, tokens: int) -> list[Row]:
    """Prompts of their own, which no other run left in a prefix cache; repeatable by the name."""
    made = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    prompts = torch.randint(8, 380, (count, asked.prompt), generator=made).tolist()
    rows = []
    for index, prompt in enumerate(prompts):
        job = Job(index, prompt, SamplingParams(max_tokens=tokens))
        how = Sampling(temperature=asked.temperature, seed=index)
        rows.append(Row(f"{name}{index}", job, how, frozenset(), tokens))
    return rows


def _finish(runner: Any, rows: Sequence[Row]) -> tuple[float, float, list[float]]:
    """Seconds in all, until all had a token, and of each step that brought one of every row."""
    for row in rows:
        runner.add(row)
    began, first_s, steps = time.perf_counter(), 0.0, []
    last = began
    while runner.running or runner.waiting:
        outputs = runner.step()
        now = time.perf_counter()
        if not first_s and all(row.completion for row in rows):
            first_s = now - began
        elif len(outputs) == len(rows):
            steps.append(now - last)
        last = now
    return last - began, first_s, steps


def _idle(runner: Any, rows: Sequence[Row], device: str) -> float | None:
    """The share of the time of some decoding steps in which no kernel ran; None on a CPU."""
    if device == "cpu":
        return None
    for row in rows:
        runner.add(row)
    while not all(len(row.completion) > PROFILED // 2 for row in rows):
        runner.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        began = time.perf_counter()
        for _ in range(PROFILED):
            runner.step()
        torch.cuda.synchronize()
        took_s = time.perf_counter() - began
    while runner.running or runner.waiting:
        runner.step()
    busy_s: float = sum(one.self_device_time_total for one in profile.key_averages()) / 1e6
    return max(0.0, 1 - busy_s / took_s)


def _tell(run: Run, expected: list[list[int]]) -> None:
    same = sum(one == other for one, other in zip(run.texts, expected, strict=True))
    shares = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        / max(1, len(one))
        for one, other in zip(run.texts, expected, strict=True)
    ]
    idle = "" if run.idle is None else f"{run.idle:.0%}"
    print(
        f"{run.way:10} {run.requests:8} {run.tokens_per_s:8.0f} {run.first_s:8.2f} "
        f"{1000 * run.step_s:8.2f} {idle:>6} {run.first_run:>7.0%}  {same}/{len(expected)} "
        f"({statistics.mean(shares):.0%} of their tokens)  detail: {run.detail}"
    )


if __name__ == "__main__":
    main()
