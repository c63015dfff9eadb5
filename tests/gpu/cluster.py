"""`python -m tests.gpu.cluster`: `launcher: ray` on a machine with GPUs.

--device cpu    try it without: NVML is made up, echo workers stand for models on GPUs, and the
                replica over two is a tiny Llama in two ranks on the CPU

A Ray head is started here, with this machine's GPUs. Two workers on a GPU each: whether each has
what Ray gave it and nothing else, then what becomes of them when one is killed, and when the
supervisor is. Then one worker over two GPUs. After each, nothing is left.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from servekit.errors import ServekitError
from servekit.protocol.messages import ReplicaStatus
from servekit.system import procfs
from tests.gpu.checks import MIB, PROMPT
from tests.gpu.nvml import Gpus, Table, gpus, show_tails
from tests.integration.instance import Instance, write_config
from tests.integration.made_up_gpus import on_gpu
from tests.integration.ray_nodes import PATIENCE_S, Nodes
from tests.polling import poll

GIB = 2**30
NAMESPACE = "gpus"
TOKENS = 256


@dataclass(slots=True)
class Run:
    """What all rows go by. `baseline` are PIDs that held memory before anything was started."""

    device: str
    gpus: Gpus
    nodes: Nodes
    table: Table
    folder: Path
    model: Path
    baseline: set[int]

    def row(self, what: str, measured: object, ok: bool | None = None) -> None:
        self.table.row(what, measured, ok)

    def names(self, held: dict[str, int]) -> str:
        index = {gpu.uuid: gpu.index for gpu in self.gpus.look()}
        shown = ", ".join(f"GPU {index[uuid]} {size // MIB} MiB" for uuid, size in held.items())
        return shown or "nothing"

    def others(self, workers: list[int]) -> str:
        """Processes that hold memory, and are no worker's and were not there before; "" if none."""
        groups = {one.pid for one in procfs.all_processes() if one.group in workers} | {*workers}
        found = self.gpus.holders() - groups - self.baseline
        return "; ".join(f"{pid} {procfs.command_line(pid)}" for pid in sorted(found))


class Service:
    """An instance in a folder, and who comes after it."""

    def __init__(self, run: Run, name: str, entry: dict[str, Any]) -> None:
        self.folder = run.folder / name
        self.folder.mkdir()
        own = {"address": run.nodes.address, "namespace": NAMESPACE, "connect_s": PATIENCE_S}
        self._config = write_config(
            self.folder, [entry], None, {"launcher": "ray", "ray": {**own, "grace_s": 60}}
        )
        self._all: list[Instance] = []
        self.again()

    def again(self) -> None:
        self.up = Instance(self.folder, self._config)
        self._all.append(self.up)

    @property
    def logs(self) -> tuple[Path, Path]:
        return self.up.log_path, self.up.run_dir / "logs"

    def workers(self) -> tuple[ReplicaStatus, ...]:
        """Of an instance that may be on its way up, or down."""
        with contextlib.suppress(ServekitError):
            return tuple(one for model in self.up.status().models for one in model.replicas)
        return ()

    def until_ready(self, count: int) -> float:
        """Seconds that it took. Fails at once where a worker has failed for good."""
        began = time.monotonic()

        def ready() -> bool:
            now = [one.state for one in self.workers()]
            assert "failed" not in now, self.workers()
            return now == ["ready"] * count

        self.up.until(f"{count} workers serve", ready, PATIENCE_S)
        return time.monotonic() - began

    def pids(self) -> list[int]:
        return [one.pid for one in self.workers()]

    def down(self) -> int:
        """`servekit down`; the exit code of the supervisor."""
        command = [sys.executable, "-m", "servekit", "down", "--run-dir", str(self.up.run_dir)]
        subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
        return self.up.wait(PATIENCE_S)

    def end(self) -> None:
        if self.up.process.poll() is None:
            self.up.signal(signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                self.up.wait(30)
        for one in self._all:
            one.end()  # of one that was killed: its gateway, too, has gone by now


@contextlib.contextmanager
def serving(run: Run, name: str, entry: dict[str, Any], count: int) -> Iterator[Service]:
    """An instance whose workers are ready; the ends of its logs where they are not."""
    service = Service(run, name, entry)
    try:
        try:
            took_s = service.until_ready(count)
        except AssertionError:
            for log in service.logs:
                show_tails(log)
            raise
        where = ", ".join(one.device for one in service.workers())
        run.row(f"{name}: serves after", f"{took_s:.1f} s; {where}"[:120])
        yield service
    finally:
        service.end()


def ask(url: str, prompt: str = PROMPT, **fields: Any) -> str:
    """One completion's text, greedy, of full length."""
    body = {"model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{url}/v1/completions", json=body | {"max_tokens": 32} | fields, timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


# ---------------------------------------------------------------- a GPU each


def apart(run: Run) -> None:
    """Two workers of a model."""
    entry: dict[str, Any] = on_gpu("m", None, 3.0, replicas=2, step_s=0.02)
    if run.device == "cuda":
        entry = {"name": "m", "path": str(run.model), "device": "cuda", "replicas": 2}
        entry["options"] = {"kv_cache_bytes": GIB}
    with serving(run, "a GPU each", entry, 2) as service:
        for check in (pinned, shown, alone, answers, worker_dies, supervisor_dies, shown):
            with run.table.section(check.__name__, *service.logs):
                check(run, service)
        ended(run, service)


_GIVEN = """
import json, os, sys, ray
from ray.util import list_named_actors
ray.init(sys.argv[1], namespace=sys.argv[2], log_to_driver=False, configure_logging=False)
def given(actor):
    import os, ray
    return os.environ.get("CUDA_VISIBLE_DEVICES", ""), ray.get_gpu_ids(), os.getpid()
found = {
    name.rpartition("#")[0]: ray.get(ray.get_actor(name).__ray_call__.remote(given), timeout=60)
    for name in list_named_actors()
}
print("found:" + json.dumps(found))
"""


def given(run: Run) -> dict[str, tuple[str, list[Any], int]]:
    """By worker, in its own actor: CUDA_VISIBLE_DEVICES, the GPUs' ids by Ray, the actor's PID."""
    command = [sys.executable, "-c", _GIVEN, run.nodes.address, NAMESPACE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found:")]
    assert lines, done.stderr[-1000:]
    found: dict[str, tuple[str, list[Any], int]] = json.loads(lines[0].removeprefix("found:"))
    return found


def pinned(run: Run, service: Service) -> None:
    """What Ray gave, what the worker's environment has, and where it holds memory are the same."""
    by_ray, seen = given(run), run.gpus.look()
    for worker in service.workers():
        visible, ids, _ = by_ray[worker.name]
        names = visible.split(",")
        own = [gpu.uuid for gpu in seen if str(gpu.index) in names or gpu.uuid in names]
        pin = environ(worker.pid).get("CUDA_VISIBLE_DEVICES", "unset")
        run.row(
            f"{worker.name}: pinned to the GPU that Ray gave",
            f"Ray {visible} (ids {ids}), pinned to {pin[:12]}",
            len(own) == 1 and pin == own[0],
        )
        held = run.gpus.of_group(worker.pid)
        run.row("… holds by NVML, and nowhere else", run.names(held), [*held] == own)
    own_gpus = {environ(pid).get("CUDA_VISIBLE_DEVICES") for pid in service.pids()}
    run.row("no two workers on one GPU", len(own_gpus), len(own_gpus) == 2)


def shown(run: Run, service: Service) -> None:
    """What `ps` and the dashboard go by is what NVML says, and has the node's name."""

    def told() -> dict[str, dict[str, int]]:
        return {
            one.name: dict(zip(one.gpus, one.held_bytes, strict=True)) for one in service.workers()
        }

    def near() -> bool:
        truth = {one.name: run.gpus.of_group(one.pid) for one in service.workers()}
        now = told()
        return len(now) == 2 and all(
            now[name].keys() == held.keys()
            and all(abs(now[name][uuid] - size) < 64 * MIB for uuid, size in held.items())
            for name, held in truth.items()
        )

    with contextlib.suppress(AssertionError):
        poll("it is known", near, 30)
    found = "; ".join(f"{name} {run.names(held)}" for name, held in told().items())
    run.row("shown of each worker, as NVML has it", found, near())
    seen = {gpu.uuid: gpu for gpu in run.gpus.look()}
    gpus = service.up.status().gpus
    text = "; ".join(
        f"GPU {one.index} on {one.node} {one.used_bytes // MIB} of {one.total_bytes // MIB} MiB"
        for one in gpus
    )
    ok = len(gpus) == 2 and all(
        one.node and abs(one.used_bytes - seen[one.uuid].used) < 64 * MIB
        and abs(one.total_bytes - seen[one.uuid].total) < 64 * MIB
        for one in gpus
    )  # fmt: skip
    run.row("shown of each GPU that Ray gave", text, ok)


def environ(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(p.decode().split("=", 1) for p in pairs if b"=" in p)


def alone(run: Run, service: Service) -> None:
    others = run.others(service.pids())
    processes = sum("ray" in procfs.command_line(one.pid) for one in procfs.all_processes())
    what = f"supervisor, gateways, actors, wardens, Ray ({processes} processes) hold"
    run.row(what, others or "nothing", not others)


def answers(run: Run, service: Service) -> None:
    """Eight at once: both workers run some."""
    url = service.up.url
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, url, f"{n} {PROMPT}", max_tokens=TOKENS) for n in range(8)]
        both = poll("both run", lambda: all(one.running for one in service.workers()), 60)
        texts = [one.result() for one in asked]
    run.row("8 answers, by both workers", f"{len(texts)}", both and all(texts))


def worker_dies(run: Run, service: Service) -> None:
    """kill -9: it is back where it was, and what it held before is free again."""
    first, other = service.workers()
    before = run.gpus.of_group(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    at = time.monotonic()
    poll("its memory is free", lambda: not run.gpus.of_group(first.pid), 30)
    free_s = time.monotonic() - at

    def back() -> ReplicaStatus | None:
        now = next((one for one in service.workers() if one.name == first.name), None)
        return now if now and now.state == "ready" and now.pid != first.pid else None

    now = service.up.until("it is back", back, PATIENCE_S)
    assert now is not None
    took_s = time.monotonic() - at
    held, beside = run.gpus.of_group(now.pid), run.gpus.of_group(other.pid)
    run.row("kill -9 of a worker: its memory free; it serves again",
            f"{free_s:.2f} s; {took_s:.1f} s", free_s < 5)  # fmt: skip
    near = all(size / 2 < held.get(uuid, 0) < size * 2 for uuid, size in before.items())
    ok = held.keys() == before.keys() and not held.keys() & beside.keys() and near
    run.row("… holds", f"{run.names(held)}; the other {run.names(beside)}", ok)
    others = run.others(service.pids())
    run.row("… and nobody else holds any", others or "nothing", not others)


def supervisor_dies(run: Run, service: Service) -> None:
    """kill -9 in the middle of a stream: it ends whole, and the next one takes the workers over."""
    url, before, first = service.up.url, service.workers(), service.up
    held = {one.name: run.gpus.of_group(one.pid) for one in before}
    calm = ask(url, max_tokens=TOKENS)
    with stream(url, TOKENS) as lines:
        pieces = [next(lines)]
        first.process.kill()
        first.process.wait()
        at = time.monotonic()
        answered = bool(ask(url, max_tokens=4))
        service.again()
        pieces += list(lines)
    text, count, finish = heard(pieces)
    run.row("kill -9 of the supervisor: another request meanwhile", answered, answered)
    run.row("… its stream ends whole, after so many tokens", f"{count} of {TOKENS}, {finish}; "
            f"same text: {text == calm}", (count, finish) == (TOKENS, "length"))  # fmt: skip
    service.until_ready(2)
    took_s = time.monotonic() - at
    now = service.workers()
    same = [one.pid for one in now] == [one.pid for one in before]
    run.row("… `servekit up` takes over the same PIDs", f"{took_s:.1f} s, {service.pids()}", same)
    run.row("… their restarts; its address", f"{[one.restarts for one in now]}; {service.up.url}",
            not any(one.restarts for one in now) and service.up.url == url)  # fmt: skip
    kept = {one.name: run.gpus.of_group(one.pid) for one in now}
    ok = all(kept[name].keys() == held[name].keys() for name in held)
    run.row("… hold what they held", "; ".join(map(run.names, kept.values())), ok)
    run.row("… and answer", ascii(ask(url, max_tokens=4)), ok=True)


@contextlib.contextmanager
def stream(url: str, tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream, as they come."""
    body = {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        yield (
            json.loads(line.removeprefix("data: "))
            for line in answer.iter_lines()
            if line.startswith("data: {")
        )


def heard(pieces: list[dict[str, Any]]) -> tuple[str, int, str]:
    """Of a stream: its text, its tokens by its own count, and how it ended."""
    choices = [one for piece in pieces for one in piece.get("choices", ())]
    usage = [piece["usage"] for piece in pieces if piece.get("usage")]
    count = usage[-1]["completion_tokens"] if usage else 0
    finish = next((one["finish_reason"] for one in choices if one.get("finish_reason")), "not")
    return "".join(one["text"] for one in choices), count, finish


def ended(run: Run, service: Service) -> None:
    """`servekit down`: no process, no memory, no actor, no placement group."""
    pids = service.pids()
    at = time.monotonic()
    code = service.down()
    poll("all processes are gone", lambda: not any(map(procfs.read_process, pids)), 30)
    run.row("servekit down: workers gone", f"{time.monotonic() - at:.1f} s, exit code {code}",
            code == 0)  # fmt: skip
    with contextlib.suppress(AssertionError):
        poll("nothing is held", lambda: not run.others([]), 10)
    others = run.others([])
    run.row("… GPU memory held by anything of ours", others or "nothing", not others)
    left = run.nodes.left()
    run.row("… actors and placement groups left in Ray", left or "none", not left)


# ---------------------------------------------------------------- over two GPUs


def over_two(run: Run) -> None:
    """`gpus_per_replica: 2`, one replica."""
    entry: dict[str, Any] = {"name": "m", "path": str(run.model), "replicas": 1}
    entry |= {"device": run.device, "gpus_per_replica": 2, "parallel": "tensor"}
    entry["options"] = {"kv_cache_bytes": GIB if run.device == "cuda" else 2**22}
    with serving(run, "one over two GPUs", entry, 1) as service:
        [worker] = service.workers()
        with run.table.section("over two", *service.logs):
            if run.device == "cpu":
                group = sum(one.group == worker.pid for one in procfs.all_processes())
                run.row("processes of the replica, on the CPU", group, group >= 2)
                run.row("… rows on GPUs", "not here")
            else:
                two_held(run, worker)
            text = ask(service.up.url, max_tokens=64)
            again = ask(service.up.url, max_tokens=64)
            shown = f"{text[:20]!a}; asked again the same: {text == again}"
            run.row("… answers", shown, bool(text) and bool(again))
        ended(run, service)


def two_held(run: Run, worker: ReplicaStatus) -> None:
    seen, pin = run.gpus.look(), environ(worker.pid).get("CUDA_VISIBLE_DEVICES", "")
    held = run.gpus.of_group(worker.pid)
    run.row("one replica holds by NVML", run.names(held), {*held} == {*pin.split(",")} and
            len(held) == 2)  # fmt: skip
    group = {worker.pid, *(one.pid for one in procfs.all_processes() if one.group == worker.pid)}
    by_rank = {
        pid: [gpu.index for gpu in seen if pid in gpu.held]
        for pid in sorted(group & run.gpus.holders())
    }
    each = sorted(by_rank.values()) == sorted([gpu.index] for gpu in seen if gpu.uuid in pin)
    run.row("… each rank on a GPU of its own", by_rank, each)
    others = run.others([worker.pid])
    run.row("… and nobody else holds any", others or "nothing", not others)


# ---------------------------------------------------------------- all of it


def write_model(device: str, folder: Path) -> Path:
    if device == "cuda":
        from tests.gpu.adapters import write_middle

        return write_middle(folder / "model")
    from tests.unit.engines.harness import write_tiny_llama

    return write_tiny_llama(folder / "model")


@contextlib.contextmanager
def ray_head(folder: Path, count: int) -> Iterator[Nodes]:
    """A Ray of one node, with so many GPUs, in a process of its own."""
    (folder / "ray").mkdir()
    # what Ray notes of the newest cluster of the machine is not to be shared with others
    own = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(own)
    nodes = Nodes(str(folder), num_cpus=8, num_gpus=count)
    try:
        yield nodes
    finally:
        nodes.end()
        for name in own:
            os.environ.pop(name, None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.cluster")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    table, began = Table(), time.monotonic()
    if importlib.util.find_spec("ray") is None:
        table.row("Ray", "is not installed", ok=False)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # sockets' paths have to be short
    try:
        with gpus(args.device, folder) as found, table.section("all of it"):
            baseline, count = found.holders(), len(found.look())
            assert count >= 2, "it takes two GPUs"
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                # while Ray starts
                writing = pool.submit(write_model, args.device, folder)
                with ray_head(folder, count) as nodes:
                    table.row("a Ray head with its GPUs is up", f"{time.monotonic() - began:.1f} s")
                    model = writing.result()
                    run = Run(args.device, found, nodes, table, folder, model, baseline)
                    for part in (apart, over_two):
                        with table.section(part.__doc__ or ""):
                            part(run)
                    left = run.others([])
                    run.row("at the end: GPU memory held by Ray", left or "nothing", not left)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table.row("all of it took", f"{time.monotonic() - began:.0f} s")
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
