"""One replica over two GPUs, and a model that sleeps: the same text, where the bytes are, how fast.

    python -m tests.gpu.spread --model PATH [--device cpu] [--dtype float32] [--ranks 2]

    one         greedy prompts on one GPU: the text, tokens/s of --clients requests at once, memory
    tensor      the same in two ranks, a GPU each
    device_map  the same in layers over two GPUs
    sleep       bytes before, asleep and awake again; how long it takes; the text
    killed      `servekit up`, kill -9 of rank 1: gone, serving again, nothing left

Each way of running is a process of its own (`--part`), as a worker is. In float32 the text has to
be the same. In lower precision sums in another order may decide a near-tie otherwise: then the two
tokens' log probabilities are no further apart than TIE where the texts part.

`--device cpu` tries the script without a GPU: ranks over gloo, and layers on the one device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from servekit.protocol.messages import TokenLogprob
from servekit.system import procfs
from servekit.system.gpu.gpus import gpu_memory_by_pid
from tests.gpu.checks import MIB, Row, ask
from tests.integration.instance import Instance
from tests.polling import poll
from tests.unit.engines.harness import Harness, make_spec

PROMPTS = [
    "The history of the city begins",
    "def fibonacci(n):",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a land far away, there lived " * 6,
    "The capital of France is",
    "SELECT name, count(*) FROM visits WHERE",
]
TOKENS = 64
#: Log probabilities of the two tokens at a near-tie: bfloat16 has 8 bits, of logits around 20.
TIE = {"float32": 1e-4, "auto": 0.25, "bfloat16": 0.25, "float16": 0.05}
UP_S = 400.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.spread")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="auto", choices=sorted(TIE))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--only", choices=["killed"], help="this alone")
    parser.add_argument("--part", choices=["one", "tensor", "device_map", "sleep"])
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    if args.part:
        print(json.dumps(asleep(args) if args.part == "sleep" else run(args)))
        return 0
    failed = False
    for row in rows(args):
        mark = {None: " ", True: "ok", False: "NOT"}[row.ok]
        print(f"{mark:3} {row.what:44} {row.measured}", flush=True)
        failed = failed or row.ok is False
    return int(failed)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    if args.only:
        yield from killed(args)
        return
    one = part(args, "one")
    yield from figures("one", one)
    for name in ("tensor", "device_map"):
        found = part(args, name)
        yield from figures(name, found)
        yield same(args, name, one, found)
    yield from sleep_rows(args, part(args, "sleep"))
    yield from killed(args)


def part(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """One way of running, in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.spread", "--part", name]
    for key in ("model", "device", "dtype", "ranks", "clients"):
        command += [f"--{key}", str(getattr(args, key))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---------------------------------------------------------------- in the process of its own


def engine(args: argparse.Namespace, **fields: Any) -> Harness:
    options = {"kv_cache_bytes": 2**30, "threads": os.cpu_count()}
    device, dtype = args.device, args.dtype
    spec = make_spec(args.model, device=device, dtype=dtype, options=options, **fields)
    return Harness(spec)


def run(args: argparse.Namespace) -> dict[str, Any]:
    spread = {} if args.part == "one" else {"gpus": args.ranks, "parallel": args.part}
    began = time.monotonic()
    harness = engine(args, max_context=1024, **spread)
    up_s = time.monotonic() - began
    tokens, best = said(harness)
    found = {
        "detail": harness.info.detail,
        "up_s": up_s,
        "tokens": tokens,
        "best": best,
        "per_s": throughput(harness, args.clients),
        "memory": memory(harness),
    }
    harness.close()
    return found


def said(harness: Harness) -> tuple[list[list[int]], list[list[dict[str, float]]]]:
    """Greedy tokens of each prompt, and the best few's log probabilities at each."""
    asked: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 8}
    jobs = [harness.submit(prompt, **asked) for prompt in PROMPTS]
    return (
        [harness.tokens(job) for job in jobs],
        [[as_json(one) for one in harness.logprobs(job)] for job in jobs],
    )


def as_json(one: TokenLogprob) -> dict[str, float]:
    """By piece; what was chosen stands first."""
    pieces = ((one.token, one.logprob), *one.best)
    return {token.hex(): value for token, value in reversed(pieces)} | {
        one.token.hex(): one.logprob
    }


def throughput(harness: Harness, clients: int) -> float:
    for turn in range(2):  # the first one warms up
        began = time.monotonic()
        jobs = [
            harness.submit(PROMPTS[index % len(PROMPTS)], max_tokens=TOKENS, ignore_eos=True)
            for index in range(clients if turn else 2)
        ]
        count = sum(len(harness.tokens(job)) for job in jobs)
        took_s = time.monotonic() - began
    return count / took_s


def memory(harness: Harness) -> dict[str, dict[str, int]]:
    """MiB of each rank, by GPU; of the process itself on a CPU."""
    ranks = harness.engine._ranks
    pids = [os.getpid(), *(ranks.pids if ranks else ())]
    held = gpu_memory_by_pid() if torch.cuda.is_available() else {}
    found = {}
    for rank, pid in enumerate(pids):
        by_gpu = {uuid[:12]: size // MIB for uuid, size in held.get(pid, {}).items()}
        found[f"rank {rank}"] = by_gpu or {"host": procfs.rss_bytes(pid) // MIB}
    return found


def asleep(args: argparse.Namespace) -> dict[str, Any]:
    harness = engine(args, max_context=1024)
    before, _ = said(harness)
    found: dict[str, Any] = {"awake": sizes()}
    for turn in ("first", "second"):
        began = time.monotonic()
        harness.engine.sleep()
        found[f"{turn}_sleep_s"] = time.monotonic() - began
        found["asleep"] = sizes()
        began = time.monotonic()
        harness.engine.wake()
        found[f"{turn}_wake_s"] = time.monotonic() - began
    found["again"] = sizes()
    found["same"] = said(harness)[0] == before
    harness.close()
    return found


def sizes() -> dict[str, int]:
    """MiB: torch's tensors, what torch has reserved, and all that NVML sees of this process."""
    if not torch.cuda.is_available():
        return {"resident": procfs.rss_bytes(os.getpid()) // MIB}
    return {
        "tensors": torch.cuda.memory_allocated() // MIB,
        "reserved": torch.cuda.memory_reserved() // MIB,
        "process": sum(gpu_memory_by_pid().get(os.getpid(), {}).values()) // MIB,
    }


# ---------------------------------------------------------------- the table


def figures(name: str, found: dict[str, Any]) -> Iterator[Row]:
    yield Row(f"{name}: how", found["detail"])
    yield Row(f"{name}: up, tokens/s", f"{found['up_s']:.1f} s, {found['per_s']:.0f}")
    held = found["memory"]
    shown = "; ".join(f"{rank} {by_gpu}" for rank, by_gpu in held.items())
    strays = name == "tensor" and any(len(by_gpu) > 1 for by_gpu in held.values())
    yield Row(f"{name}: MiB by rank and GPU", shown, not strays)


def same(args: argparse.Namespace, name: str, one: dict[str, Any], other: dict[str, Any]) -> Row:
    """Whether the text is one GPU's, up to near-ties."""
    gaps = [
        gap(mine, theirs, best, others)
        for mine, theirs, best, others in zip(
            one["tokens"], other["tokens"], one["best"], other["best"], strict=True
        )
    ]
    apart = [found for found in gaps if found is not None]
    shown = f"{len(gaps) - len(apart)} of {len(gaps)} texts the same"
    shown += "".join(f"; parted at {at}, {size:.4f} apart" for at, size in apart)
    return Row(
        f"{name}: greedy text is one GPU's", shown, all(s <= TIE[args.dtype] for _, s in apart)
    )


def gap(
    mine: list[int],
    theirs: list[int],
    best: list[dict[str, float]],
    others: list[dict[str, float]],
) -> tuple[int, float] | None:
    """Where two texts part, and how far apart the two tokens were there to the first."""
    for at, (token, other) in enumerate(zip(mine, theirs, strict=True)):
        if token != other:
            chosen = max(others[at], key=others[at].__getitem__)
            return at, max(best[at].values()) - best[at].get(chosen, -float("inf"))
    return None


def sleep_rows(args: argparse.Namespace, found: dict[str, Any]) -> Iterator[Row]:
    for when in ("awake", "asleep", "again"):
        empty = args.device == "cpu" or found[when].get("reserved", 0) == 0
        yield Row(f"sleep: MiB {when}", str(found[when]), empty if when == "asleep" else None)
    for turn in ("first", "second"):
        shown = f"{found[f'{turn}_sleep_s']:.2f} s, {found[f'{turn}_wake_s']:.2f} s"
        yield Row(f"sleep: {turn} to sleep, to wake", shown)
    yield Row("sleep: the same text again", str(found["same"]), found["same"])


# ---------------------------------------------------------------- killed


def killed(args: argparse.Namespace) -> Iterator[Row]:
    entry = {
        "name": "m",
        "path": args.model,
        "device": args.device,
        "dtype": args.dtype,
        "replicas": 1,
        "gpus_per_replica": args.ranks,
        "parallel": "tensor",
        "max_context": 1024,
        "options": {"kv_cache_bytes": 2**30},
    }
    with (
        tempfile.TemporaryDirectory(prefix="servekit-gpu-") as folder,
        Instance.up(Path(folder), [entry]) as instance,
    ):
        instance.until_settled(UP_S)
        yield from killed_in(instance)


def killed_in(instance: Instance) -> Iterator[Row]:
    before = ask(instance)
    worker = instance.replica("m/0").pid
    group = [worker, *(process.pid for process in procfs.find_descendants(worker))]
    began = time.monotonic()
    os.kill(group[1], signal.SIGKILL)
    poll(
        "all of the replica is gone", lambda: not any(map(procfs.read_process, group)), within_s=10
    )
    gone_s = time.monotonic() - began
    poll("its memory is gone", lambda: not _held(group), within_s=10)
    free_s = time.monotonic() - began
    yield Row("killed: its replica gone", f"{gone_s:.2f} s", gone_s < 2)
    yield Row("killed: its memory given back", f"{free_s:.2f} s", free_s < 2)

    def again() -> bool:
        now = instance.replica("m/0")
        return now.state == "ready" and now.pid != worker

    instance.until("it serves again", again, UP_S)
    yield Row("killed: serves again", f"{time.monotonic() - began:.1f} s")
    yield Row("killed: the same text again", "", ask(instance) == before)


def _held(pids: list[int]) -> bool:
    held = gpu_memory_by_pid() if torch.cuda.is_available() else {}
    return any(held.get(pid) for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
