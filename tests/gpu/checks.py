"""What only GPUs can show, each as a function that returns rows of a table.

`python -m tests.gpu` runs them all and prints the table; tests/integration/test_gpu.py asserts
them one by one where there are GPUs. `--device cpu` runs what can be run without.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from servekit.protocol.messages import ReplicaStatus
from servekit.system.gpu.gpus import find_gpus, gpu_memory_by_pid
from tests.integration.instance import Instance, write_config
from tests.polling import poll

MIB = 2**20
STALL_TIMEOUT_S = 5.0
PROMPT = "The history of the city begins"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `ok` None is a figure without a bar."""

    what: str
    measured: str
    ok: bool | None = None


#: What weights are served in; "auto" is what they are stored in.
DTYPE = "auto"


def model(path: str, device: str, replicas: int, **options: Any) -> dict[str, Any]:
    """The entry of a configuration file."""
    return {
        "name": "m",
        "path": path,
        "device": device,
        "replicas": replicas,
        "dtype": DTYPE,
        "stall_timeout_s": STALL_TIMEOUT_S,
        "options": options,
    }


@contextmanager
def serving(folder: Path, entry: dict[str, Any], **server: Any) -> Iterator[Instance]:
    """An instance whose replicas are all ready."""
    with Instance.up(folder, [entry], server=server) as instance:
        instance.until_settled(within_s=400)
        states = {r.name: (r.state, r.reason) for r in instance.model("m").replicas}
        assert all(state == "ready" for state, _ in states.values()), states
        yield instance


def ask(instance: Instance, prompt: str = PROMPT, **fields: Any) -> str:
    """One completion's text, greedy unless told otherwise."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 48, "temperature": 0, **fields}
    return complete(instance, body)


@functools.cache
def client() -> httpx.Client:
    """Return a client with connections that last: a new one for each request takes 30 ms."""
    return httpx.Client(timeout=300, limits=httpx.Limits(max_connections=None))


def complete(instance: Instance, body: dict[str, Any]) -> str:
    """One completion's text."""
    answer = client().post(f"{instance.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


# ---------------------------------------------------------------- pinning and memory


def pins(instance: Instance) -> list[Row]:
    """Each worker's environment has its pin, another for each, and from its first instruction."""
    replicas = instance.model("m").replicas
    seen = {r.name: _environ(r.pid).get("CUDA_VISIBLE_DEVICES", "unset") for r in replicas}
    own = all(seen[r.name] == ",".join(r.gpus) for r in replicas)
    distinct = len(set(seen.values())) == len(seen) or not replicas[0].gpus
    shown = "; ".join(f"{name} {pin[:12] or 'none'}" for name, pin in seen.items())
    return [Row("each worker pinned to its own GPU by UUID", shown, own and distinct)]


def _environ(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(p.decode().split("=", 1) for p in pairs if b"=" in p)


def memory(instance: Instance) -> list[Row]:
    """NVML's process list: each PID on its own GPU only, and no other process of ours on any."""
    held = gpu_memory_by_pid()
    rows = []
    for replica in instance.model("m").replicas:
        of_pid = held.get(replica.pid, {})
        own = sum(of_pid.get(uuid, 0) for uuid in replica.gpus)
        stray = sum(of_pid.values()) - own
        shown = f"{own // MIB} MiB own, {stray} B elsewhere"
        rows.append(Row(f"memory of {replica.name}", shown, own > 0 and stray == 0))
    status = instance.status()
    others = [status.pid, *(gateway.pid for gateway in status.gateways)]
    theirs = sum(sum(held.get(pid, {}).values()) for pid in others)
    rows.append(Row("memory of supervisor and gateways", f"{theirs} B", theirs == 0))
    return rows


def released(instance: Instance) -> list[Row]:
    """SIGKILL of the supervisor: no process and no VRAM of it two seconds later."""
    pids = [r.pid for r in instance.model("m").replicas]
    instance.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    poll("all is gone", lambda: not instance.survivors() and not _held(pids), 10)
    took_s = time.monotonic() - killed_at
    return [Row("nothing alive, no VRAM held, after kill -9", f"{took_s:.2f} s", took_s < 2)]


def _held(pids: list[int]) -> int:
    held = gpu_memory_by_pid()
    return sum(sum(held.get(pid, {}).values()) for pid in pids)


def supervisor_cost(instance: Instance) -> list[Row]:
    """What the supervisor takes while it watches GPUs: memory, and CPU over ten seconds."""
    status = instance.status()
    before_s, began = _cpu_s(status.pid), time.monotonic()
    poll("ten seconds pass", lambda: time.monotonic() - began > 10.0, within_s=20.0)
    share = (_cpu_s(status.pid) - before_s) / (time.monotonic() - began)
    rss = status.rss_bytes / 1e6
    return [
        Row("supervisor's resident memory", f"{rss:.0f} MB", rss < 60),
        Row("supervisor's CPU, of one core, over 10 s", f"{share:.1%}"),
    ]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- the known failures

_FORK = """
import multiprocessing, torch
torch.zeros(1, device="cuda")
def child():
    torch.zeros(1, device="cuda")
process = multiprocessing.get_context("fork").Process(target=child)
process.start(); process.join(60)
"""
_LATE = """
import os, torch
torch.zeros(1, device="cuda"); before = torch.cuda.device_count()
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
print(before, torch.cuda.device_count())
"""


def known_failures(instance: Instance) -> list[Row]:
    """A fork after CUDA init fails as everybody knows, while ours serve beside it."""
    fork = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True)
    failed = "Cannot re-initialize CUDA in forked subprocess" in fork.stderr
    served = bool(ask(instance))
    late = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True)
    shown = " → ".join(late.stdout.split()) or late.stderr[-80:]
    return [
        Row("fork after CUDA init fails with the known error", str(failed), failed),
        Row("… while servekit serves", str(served), served),
        Row("GPUs seen before → after a late CUDA_VISIBLE_DEVICES=0", shown),
    ]


# ---------------------------------------------------------------- answers and speed


def answers(instance: Instance) -> list[Row]:
    """Greedy is the same on every replica; a seed is the same alone and in a crowd."""
    count = len(instance.model("m").replicas)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        greedy = set(pool.map(lambda _: ask(instance), range(4 * count)))
        alone = ask(instance, temperature=1.0, seed=7)
        others = [pool.submit(ask, instance, temperature=1.0) for _ in range(24)]
        crowd = ask(instance, temperature=1.0, seed=7)
        noise = {other.result() for other in others}
    return [
        Row("different greedy texts over all replicas", str(len(greedy)), len(greedy) == 1),
        Row("seeded: same text alone and in a crowd", str(alone == crowd), alone == crowd),
        Row("different texts among 24 unseeded", str(len(noise)), len(noise) > 12),
    ]


def speed(instance: Instance, clients: int, tokens: int = 128) -> list[Row]:
    """Tokens per second over all replicas, not streamed, every answer full length."""
    fields = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda n: ask(instance, f"{n} {PROMPT}", max_tokens=8), range(clients)))
        began = time.monotonic()
        list(pool.map(lambda n: ask(instance, f"{n} {PROMPT}", **fields), range(clients)))
        took_s = time.monotonic() - began
    rate = clients * tokens / took_s
    return [Row(f"tokens/s at {clients} requests of {tokens}", f"{rate:,.0f}")]


#: How often each question is asked while a worker dies.
ROUNDS = 6


def worker_dies(instance: Instance, tokens: int = 256) -> list[Row]:
    """SIGKILL of a worker under load: every answer comes, and is the undisturbed one."""
    prompts = [f"{n} {PROMPT}" for n in range(8)]
    fields = {"max_tokens": tokens, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calm = list(pool.map(lambda p: ask(instance, p, **fields), prompts))
        # several rounds: a worker says once a second that it runs something
        prompts *= ROUNDS
        again = [pool.submit(ask, instance, p, **fields) for p in prompts]
        victim = instance.model("m").replicas[0].pid
        poll("both run", lambda: all(r.running for r in instance.model("m").replicas), 30)
        os.kill(victim, signal.SIGKILL)
        texts = [future.result() for future in again]
    same = sum(a == b for a, b in zip(calm * ROUNDS, texts, strict=True))
    whole = all(texts)
    return [
        Row("answers after a worker's SIGKILL", f"{len(texts)} of {len(prompts)}", whole),
        Row("… equal to the undisturbed (bf16: up to near-ties)", f"{same} of {len(prompts)}"),
    ]


def forked(instance: Instance) -> list[Row]:
    """A worker forked from a standby uses its GPU as a fresh one does, and is up sooner."""
    poll("all are ready", lambda: _all_ready(instance), 200)
    first = instance.model("m").replicas[0]
    standby = poll("a standby is ready", lambda: _standby(instance, first.device), 120)
    assert standby is not None
    held = _held([standby.pid])
    calm = ask(instance)
    os.kill(first.pid, signal.SIGKILL)
    killed_at = time.monotonic()

    def back() -> ReplicaStatus | None:
        now = instance.replica(first.name)
        return now if now.state == "ready" and now.pid != first.pid else None

    now = poll("it is back", back, 120)
    assert now is not None
    took_s = time.monotonic() - killed_at
    child = b"--control-fd" not in Path(f"/proc/{now.pid}/cmdline").read_bytes()
    fresh_s = sum(first.timings_s.values())
    own = gpu_memory_by_pid().get(now.pid, {})
    stray = sum(own.values()) - sum(own.get(uuid, 0) for uuid in now.gpus)
    return [
        Row("a standby's memory on GPUs", f"{held} B", held == 0),
        Row("kill to ready, forked from it", f"{took_s:.1f} s (afresh {fresh_s:.1f} s)", child),
        Row("… its memory elsewhere than on its own GPU", f"{stray} B", stray == 0),
        Row("… and its greedy text as before", str(ask(instance) == calm)),
    ]


def _standby(instance: Instance, device: str) -> ReplicaStatus | None:
    ready = (s for s in instance.model("m").standbys if s.state == "ready")
    return next((standby for standby in ready if standby.device == device), None)


def worker_stalls(instance: Instance) -> list[Row]:
    """SIGSTOP of a worker under load: it is killed and replaced, and its VRAM is free again."""
    poll("all are ready", lambda: _all_ready(instance), 200)
    victim = instance.model("m").replicas[0]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, instance, f"{n} {PROMPT}", max_tokens=256) for n in range(8)]
        os.kill(victim.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        texts = [future.result() for future in asked]

        def replaced() -> bool:
            now = instance.replica(victim.name)
            return now.state == "ready" and now.pid != victim.pid and not _held([victim.pid])

        poll("the stalled worker is replaced", replaced, 120)
        took_s = time.monotonic() - stopped_at
    shown = f"{took_s:.1f} s, loading included"
    return [
        Row(f"SIGSTOPped worker replaced (timeout {STALL_TIMEOUT_S:g} s)", shown, took_s < 60),
        Row("… and all answers came", f"{sum(map(bool, texts))} of 8", all(texts)),
    ]


def reloads(instance: Instance) -> list[Row]:
    """Reload with the GPUs all taken: the old goes first, and comes back if the new cannot load."""
    poll("all are ready", lambda: _all_ready(instance), 200)
    return [
        _reloaded(instance, "another block size", {"block_size": 64}),
        _reloaded(instance, "no such attention", {"attention": "nonsense"}),
    ]


def _reloaded(instance: Instance, what: str, options: dict[str, Any]) -> Row:
    entry = instance.model("m")
    device = "cpu" if entry.replicas[0].device == "cpu" else "cuda"
    old = {replica.pid for replica in entry.replicas}
    began = time.monotonic()
    _reload(instance, model(entry.path, device, len(entry.replicas), **options))
    if "attention" in options:  # it cannot load: who was drained for it comes back
        poll(f"{what} is refused", lambda: "model_reload_failed" in instance.log, 120)
        poll(f"it serves after {what}", lambda: _all_ready(instance), 120)
    else:
        poll(f"it serves after {what}", lambda: _replaced(instance, old), 120)
    took_s = time.monotonic() - began
    left = _held(sorted(old - {replica.pid for replica in instance.model("m").replicas}))
    served = bool(ask(instance))
    shown = f"{took_s:.1f} s; {left} B held by the old"
    return Row(f"reload, {what}: serves again", shown, served and not left)


def _reload(instance: Instance, changed: dict[str, Any]) -> None:
    write_config(instance.run_dir.parent, [changed])
    command = [sys.executable, "-m", "servekit", "reload", "--run-dir", str(instance.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _replaced(instance: Instance, old: set[int]) -> bool:
    now = {replica.pid for replica in instance.model("m").replicas}
    return _all_ready(instance) and not now & old


def _all_ready(instance: Instance) -> bool:
    return all(replica.state == "ready" for replica in instance.model("m").replicas)


def checks(device: str, clients: int) -> list[Callable[[Instance], list[Row]]]:
    """All checks in order; the last one ends the instance."""
    common = [answers, lambda instance: speed(instance, clients), worker_dies]
    common = [forked, *common, worker_stalls, reloads, supervisor_cost]
    if device == "cpu":
        return [pins, *common, released]
    return [pins, memory, known_failures, *common, released]


def gpu_count() -> int:
    """GPUs that NVML shows."""
    return len(find_gpus())
