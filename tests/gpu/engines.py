"""`python -m tests.gpu.engines`: engines side by side on one GPU, and one engine on several.

--model PATH     a folder of safetensors; by default a random Llama of 0.35e9 parameters
--device cpu     try the script itself, with transformers alone
--dtype float32  of the models that share a GPU
--only NAME      one of: sharing, tensor, fp8, server

- sharing: vLLM and transformers on one GPU, each within what the file gives it.
- tensor: vLLM on one GPU and over two say the same, greedy: a small model that was trained for it
  recites what it has learnt by heart, so that no near-tie is left to rounding.
- fp8: vLLM recites with weights and KV cache in 8 bits, by `quantization` and `engine_args`.
- server: vLLM's own server by `engine: command` recites, sleeps, gives its memory back, and wakes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from servekit.system.gpu.gpus import find_gpus, gpu_memory_by_pid
from servekit.system.procfs import all_processes
from tests.gpu.adapters import write_middle
from tests.gpu.checks import MIB, PROMPT, Row, gpu_count
from tests.gpu.reciting import TEXTS, prompts, write_reciter
from tests.integration.instance import Instance
from tests.polling import poll

GIB = 2**30
#: What each of two models on one GPU may take of it.
CLAIMS = {"v": 24 * GIB, "t": 12 * GIB}
PROMPTS = [f"{n} {PROMPT}" for n in range(8)]
CHECKS = ("sharing", "tensor", "fp8", "server")
#: Whole MiB that a server may hold while it sleeps: its CUDA context, and the graphs.
ASLEEP_MIB = 2500


def entry(name: str, engine: str, path: Path, device: str, **fields: Any) -> dict[str, Any]:
    """One model of a configuration file."""
    return {"name": name, "engine": engine, "path": str(path), "device": device} | fields


@contextmanager
def serving(models: list[dict[str, Any]]) -> Iterator[Instance]:
    """An instance whose models are all ready."""
    with (
        tempfile.TemporaryDirectory(prefix="servekit-gpu-") as folder,
        Instance.up(Path(folder), models) as instance,
    ):
        instance.until_settled(within_s=400)
        for model in instance.status().models:
            states = {r.name: (r.state, r.reason) for r in model.replicas}
            assert all(state == "ready" for state, _ in states.values()), states
        yield instance


def ask(instance: Instance, model: str, prompt: str, **fields: Any) -> str:
    """One completion's text, greedy."""
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0} | fields
    answer = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def texts(instance: Instance, model: str, prompts: list[str] = PROMPTS, **fields: Any) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(instance, model, prompt, **fields), prompts))


def alike(one: list[str], other: list[str]) -> str:
    same = sum(a == b for a, b in zip(one, other, strict=True))
    begun = sum(a[:1] == b[:1] for a, b in zip(one, other, strict=True))
    return f"{same} of {len(one)} whole, {begun} in the first character"


def held_by_group(pid: int) -> dict[str, int]:
    """Bytes on each GPU, of a process and all in its group."""
    group = {pid, *(process.pid for process in all_processes() if process.group == pid)}
    found: dict[str, int] = {}
    for one, held in gpu_memory_by_pid().items():
        if one in group:
            for uuid, held_bytes in held.items():
                found[uuid] = found.get(uuid, 0) + held_bytes
    return found


# ---------------------------------------------------------------- side by side


def sharing(path: Path, device: str, dtype: str) -> list[Row]:
    """Two models and two engines on one GPU, at rest and under load."""
    place: dict[str, Any] = {"gpus": [0]}
    first = "vllm" if device == "cuda" else "transformers"
    if device == "cpu":
        place = {"options": {"kv_cache_bytes": 2**26}}
    share = 1 if device == "cuda" else 8  # of this machine's memory, which may be little
    models = [
        entry("v", first, path, device, memory=f"{CLAIMS['v'] // share}B", dtype=dtype, **place),
        entry(
            "t",
            "transformers",
            path,
            device,
            memory=f"{CLAIMS['t'] // share}B",
            dtype=dtype,
            **place,
        ),
    ]
    with serving(models) as instance:
        by_v, by_t = texts(instance, "v"), texts(instance, "t")
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: texts(instance, name, max_tokens=256), ("v", "t")))
        rows = [_within(instance, name, device) for name in ("v", "t")]
        rows.append(Row("the same prompts, greedy, by both engines", alike(by_v, by_t)))
        return rows + (_ended(instance) if device == "cuda" else [])


def _within(instance: Instance, name: str, device: str) -> Row:
    [replica] = instance.model(name).replicas
    if device == "cpu":
        return Row(f"{name}: resident", f"{replica.rss_bytes // MIB} MiB")
    held = held_by_group(replica.pid)
    own = sum(held.get(uuid, 0) for uuid in replica.gpus)
    stray = sum(held.values()) - own
    shown = f"{own / GIB:.2f} of {CLAIMS[name] / GIB:.0f} GiB, {stray} B elsewhere"
    return Row(
        f"{name}: held of its claim, after load", shown, 0 < own <= CLAIMS[name] and not stray
    )


def _ended(instance: Instance) -> list[Row]:
    groups = [m.replicas[0].pid for m in instance.status().models]
    pids = [p.pid for p in all_processes() if p.group in groups]
    instance.signal(signal.SIGKILL)
    at = time.monotonic()

    def gone() -> bool:
        return not instance.survivors() and not set(pids) & gpu_memory_by_pid().keys()

    poll("nothing is left", gone, 20)
    took_s = time.monotonic() - at
    what = f"kill -9 of the supervisor: {len(pids)} processes and their memory gone"
    return [Row(what, f"{took_s:.2f} s", took_s < 2)]


# ---------------------------------------------------------------- over several GPUs


def tensor(path: Path, device: str, dtype: str) -> list[Row]:
    """vLLM on one GPU, and over two."""
    if device == "cpu" or gpu_count() < 2:
        return [Row("vLLM over two GPUs", "not here")]
    keys: dict[str, Any] = {"replicas": 1, "options": {"enforce_eager": True}}
    with tempfile.TemporaryDirectory(prefix="servekit-model-") as folder:
        path = write_reciter(Path(folder) / "reciter", device)
        with serving([entry("v", "vllm", path, device, **keys)]) as instance:
            rows = [recited("vLLM on one GPU", instance)]
        with serving([entry("v", "vllm", path, device, gpus_per_replica=2, **keys)]) as instance:
            return rows + _over_two(instance)


def fp8(path: Path, device: str, dtype: str) -> list[Row]:
    """vLLM in 8 bits: rounding may cost a text or two, not most of them."""
    if device == "cpu":
        return [Row("vLLM in 8 bits", "not here")]
    options: dict[str, Any] = {"enforce_eager": True, "quantization": "fp8"}
    options["engine_args"] = {"kv_cache_dtype": "fp8"}
    with tempfile.TemporaryDirectory(prefix="servekit-model-") as folder:
        path = write_reciter(Path(folder) / "reciter", device)
        with serving([entry("v", "vllm", path, device, options=options)]) as instance:
            row = recited("vLLM with weights and KV cache in 8 bits", instance)
            return [Row(row.what, row.measured, not row.measured.startswith("0 "))]


def server(path: Path, device: str, dtype: str) -> list[Row]:
    """vLLM's own server, put to sleep and woken by a request."""
    if device == "cpu":
        return [Row("vLLM's own server asleep", "not here")]
    options = {
        "command": f"{sys.executable} -m vllm.entrypoints.openai.api_server --model={{path}} "
        "--served-model-name={name} --host={host} --port={port} --enable-sleep-mode "
        "--enforce-eager --gpu-memory-utilization=0.3",
        "slots": 16,
        "sleep": "/sleep?level=1",
        "wake": "/wake_up",
    }
    more: dict[str, Any] = {"idle_sleep_s": 600, "env": {"VLLM_SERVER_DEV_MODE": "1"}}
    more |= {"options": options, "load_timeout_s": 400}
    with tempfile.TemporaryDirectory(prefix="servekit-model-") as folder:
        path = write_reciter(Path(folder) / "reciter", device)
        with serving([entry("v", "command", path, device, **more)]) as instance:
            rows = [recited("vLLM's own server", instance)]
            held = [_held_mib(instance)]
            for command in ("sleep", "wake"):
                began_s = time.monotonic()
                done = instance.run(command, "v")
                assert done.returncode == 0, done.stderr
                rows.append(Row(f"… servekit {command}", f"{time.monotonic() - began_s:.1f} s"))
                held.append(_held_mib(instance))
                if command == "sleep":
                    rows.append(recited("… asked while it sleeps", instance))
                    instance.run("sleep", "v")
            shown = ", ".join(f"{mib:,}" for mib in held) + " MiB"
            rows.append(Row("… held before, asleep, awake", shown, held[1] < ASLEEP_MIB < held[0]))
            return [*rows, recited("… and then", instance)]


def _held_mib(instance: Instance) -> int:
    [replica] = instance.model("v").replicas
    return sum(held_by_group(replica.pid).values()) // MIB


def _over_two(instance: Instance) -> list[Row]:
    [replica] = instance.model("v").replicas
    first = recited("vLLM over two", instance)
    held = held_by_group(replica.pid)
    names = {gpu.uuid: gpu.index for gpu in find_gpus()}
    shown = ", ".join(f"GPU {names[u]}: {held.get(u, 0) / GIB:.1f} GiB" for u in replica.gpus)
    return [
        first,
        Row("… memory of the two", shown, all(held.get(u) for u in replica.gpus)),
        _rank_dies(instance, replica.pid),
        recited("… and then", instance),
    ]


def recited(what: str, instance: Instance, model: str = "v") -> Row:
    begun = prompts()
    said = texts(instance, model, begun, max_tokens=200)
    same = sum(a + b == text for a, b, text in zip(begun, said, TEXTS, strict=True))
    return Row(
        f"{what}, greedy: texts it knows by heart", f"{same} of {len(TEXTS)}", same == len(TEXTS)
    )


def _rank_dies(instance: Instance, pid: int) -> Row:
    """SIGKILL of the process that holds the second GPU: its replica comes up again as one."""
    group = [p.pid for p in all_processes() if p.group == pid and p.pid != pid]
    victim = next(p for p in reversed(group) if p in gpu_memory_by_pid())
    os.kill(victim, signal.SIGKILL)
    at = time.monotonic()

    def back() -> bool:
        [now] = instance.model("v").replicas
        return now.state == "ready" and now.pid != pid

    poll("it is back", back, 200)
    took_s = time.monotonic() - at
    return Row("a rank killed: the replica serves again after", f"{took_s:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.engines")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--only", choices=CHECKS)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="servekit-model-") as folder:
        path = args.model or write_middle(Path(folder) / "middle")
        for check in [args.only] if args.only else CHECKS:
            for row in globals()[check](path, args.device, args.dtype):
                mark = {True: "yes", False: "NO", None: ""}[row.ok]
                print(f"| {row.what:<64} | {row.measured:<52} | {mark:<3} |", flush=True)
                failed |= row.ok is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
