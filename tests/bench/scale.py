"""Where one gateway, one supervisor and one cluster end: `python -m tests.bench.scale`.

The cluster is simulated (tests/bench/cluster.py: the real routing and restart policies, no
processes); the messages are the real ones, encoded and decoded here; the processes are a real
instance with so many echo workers as `--workers` says. CPU times are this machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from servekit.cli.display.startup_display import is_start_over
from servekit.errors import ServekitError
from servekit.gateway.routing.balancing.load_balancer import Balancer
from servekit.protocol.messages import (
    ModelInfo,
    ModelStatus,
    ReplicaStatus,
    Status,
    ToGateway,
    Topology,
)
from tests.bench.cluster import Cluster, Outcome, Seen, Shape, Worker, call
from tests.bench.cpu import cpu_s, memory_bytes
from tests.integration.instance import Instance, echo
from tests.polling import poll

#: BannerFacts of about 4 characters, all unlike; a prompt of 4000 characters.
_TEXT = " ".join(f"{number:04}" for number in range(800))


def topology(workers: int) -> Topology:
    """As a supervisor sends it, of one model on GPUs."""
    info = ModelInfo(8192, 64, True, "llama", "bfloat16", "cuda", 8_000_000_000)
    return Topology((ModelStatus("m", "vllm", "org/model", 1, _replicas(workers), info),))


def _replicas(workers: int) -> tuple[ReplicaStatus, ...]:
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    timings_s = {"import": 3.0, "load": 20.0, "warm-up": 1.0}
    return tuple(
        ReplicaStatus(
            name=f"m/{index}",
            state="ready",
            socket=f"/run/user/1000/servekit/worker-{index}.sock",
            pid=10_000 + index,
            device="GPU 3 (NVIDIA H200)",
            gpus=(uuid,),
            running=index % 64,
            rss_bytes=2 * 10**9,
            gpu_bytes=90 * 10**9,
            timings_s=timings_s,
            claim_bytes=10**11,
            kv_used=0.4,
            held_bytes=(90 * 10**9,),
        )
        for index in range(workers)
    )


def took_s(act: Callable[[], object], times: int) -> float:
    """CPU time of one, the least of five rounds."""

    def one_round() -> float:
        begun = time.thread_time()
        for _ in range(times):
            act()
        return (time.thread_time() - begun) / times

    return min(one_round() for _ in range(5))


def messages(workers: int) -> tuple[int, float, float, float]:
    """Of a Topology: bytes; seconds to make, to encode, to decode."""
    told, encoder = topology(workers), msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(ToGateway)
    frame, times = encoder.encode(told), max(1, 2000 // workers)
    return (
        len(frame),
        took_s(lambda: topology(workers), times),
        took_s(lambda: encoder.encode(told), times),
        took_s(lambda: decoder.decode(frame), times),
    )


def choice_s(workers: int, *, caches: bool, session: bool = False) -> float:
    """CPU time of one choice at a gateway, with a prompt of 4000 characters."""
    seen = [Seen(Worker(index, lambda: 0.5), 64, 1) for index in range(workers)]
    for one in seen if caches else ():
        one.info = ModelInfo(8192, 64, True, "m", "bfloat16", "cuda", prefix_block=16)
    balancer: Balancer[Seen] = Balancer()
    calls = iter([call(f"{n} {_TEXT}", session=f"s{n}" if session else "") for n in range(60)])
    return took_s(lambda: balancer.choose(seen, next(calls)), 10)


# ---------------------------------------------------------------- what is printed


def told(outcome: Outcome, shape: Shape) -> Iterator[str]:
    yield f"| {shape.workers} workers, {shape.gateways} gateways, {shape.streams} streams | |"
    yield "|---|---|"
    for when, (p99, most) in outcome.spread.items():
        yield f"| streams at a worker {when}: p99, most, of the mean | {p99:.2f}, {most:.2f} |"
    yield f"| one choice | {outcome.choice_us:.0f} µs |"
    dead = round(shape.kill * shape.workers)
    yield f"| {dead} workers die at once: streams that go on elsewhere | {outcome.lost} |"
    waits = sorted(outcome.waits)
    shown = [f"{waits[int(share * (len(waits) - 1))]:.2f}" for share in (0.5, 0.99, 1.0)]
    yield f"| … they wait for a slot: p50, p99, most | {', '.join(shown)} s |"
    yield f"| … starts of workers within 0.1 s, at most | {outcome.most_starts} |"
    whole = "never" if outcome.whole_s is None else f"{outcome.whole_s:.1f} s"
    yield f"| … all serve again, a load taking {shape.load_s:g} s, after | {whole} |"
    yield f"| … requests at a new worker in its first second, of the mean | {outcome.rush:.0f} |"


def simulated(shape: Shape) -> None:
    begun = time.perf_counter()
    for line in told(Cluster(shape).run(), shape):
        print(line)
    print(
        f"\n(slots {shape.slots}; simulated in {time.perf_counter() - begun:.0f} s)\n", flush=True
    )


def measured() -> None:
    print(
        "| workers | Topology | to make | to encode | to decode | a choice | with caches |"
        " with sessions |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for workers in (10, 100, 1000):
        size, make_s, encode_s, decode_s = messages(workers)
        choices = [
            choice_s(workers, caches=False),
            choice_s(workers, caches=True),
            choice_s(workers, caches=False, session=True),
        ]
        cells = [f"{1e6 * one:.0f} µs" for one in choices]
        times = [f"{1e3 * one:.2f} ms" for one in (make_s, encode_s, decode_s)]
        print(f"| {workers} | {size / 1000:.0f} kB | {' | '.join([*times, *cells])} |", flush=True)
    print()


def real(workers: int) -> None:
    """An instance with so many, at rest."""
    with tempfile.TemporaryDirectory() as folder:
        model = echo("m", replicas=workers)
        with Instance.up(Path(folder), [model], server={"gateways": 2}) as instance:
            status = poll("its start is over", lambda: _at_rest(instance), 600)
            assert status is not None
            begun, pid = time.perf_counter(), instance.pid
            pids = [pid, status.gateways[0].pid, status.models[0].replicas[0].pid]
            before = [cpu_s(one) for one in pids]
            time.sleep(15)  # the figure is of a stretch of time
            passed_s = time.perf_counter() - begun
            spent = [
                100 * (cpu_s(one) - was) / passed_s for one, was in zip(pids, before, strict=True)
            ]
            files = [len(list(Path(f"/proc/{one}/fd").iterdir())) for one in pids]
            sizes = [memory_bytes(one)[0] / 1e6 for one in pids]
            for name, cpu, count, size in zip(
                ("supervisor", "gateway", "worker"), spent, files, sizes, strict=True
            ):
                start = f"{before[0]:.1f} s" if name == "supervisor" else ""
                cells = name, start, f"{cpu:.1f} %", str(count), f"{size:.0f} MB"
                print(f"| {workers} | {' | '.join(cells)} |", flush=True)


def _at_rest(instance: Instance) -> Status | None:
    with contextlib.suppress(ServekitError):  # with many it is busy while they start
        status = instance.status()
        return status if is_start_over(status) else None
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 32])
    parser.add_argument("--only", choices=["simulation", "messages", "processes"])
    parser.add_argument("--quick", action="store_true", help="a tenth of the cluster")
    asked = parser.parse_args()
    size = 10 if asked.quick else 1
    whole = Shape(1000 // size, max(4, 16 // size), 100_000 // size, before_s=10.0, after_s=40.0)
    if asked.only in (None, "simulation"):
        simulated(whole)
        simulated(replace(whole, slots=112))
    if asked.only in (None, "messages"):
        measured()
    if asked.only in (None, "processes"):
        print("| workers | process | supervisor's start | CPU at rest | files | memory |")
        print("|---|---|---|---|---|---|")
        for workers in asked.workers:
            real(workers)


if __name__ == "__main__":
    main()
