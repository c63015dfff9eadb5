"""`python -m tests.gpu.watch`: whether what is shown of GPUs is what NVML says of them.

--device cpu    try it without a GPU: NVML is made up, and echo workers stand for models
--keep FOLDER   leave /metrics, `servekit top`, `servekit ps --json` and the dashboard there

Two models, on the first GPU and on the last, under streams; then another program on GPU 0. Asked
are /metrics, the dashboard (as its page is filled, without a browser), `servekit top` at once and
on a terminal, and `servekit ps --json`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.gpu.checks import MIB
from tests.gpu.nvml import Gpus, Seen, Table, gpus, stranger
from tests.gpu.shown import AUTH, HAS_UI, HASH, Watched, frame, gpu_cards, read_card
from tests.integration.instance import Instance
from tests.integration.made_up_gpus import on_gpu

GIB = 2**30
#: A worker's bytes may change between two looks, and servekit looks every five seconds.
NEAR_BYTES = 64 * MIB
STRANGER_BYTES = 600 * MIB
CLAIM = 40 * GIB


# ---------------------------------------------------------------- the instance


def models(device: str, folder: Path, last: int) -> list[dict[str, Any]]:
    """`first` has a claim on GPU 0, `last` has the last GPU."""
    if device == "cpu":
        one = on_gpu("first", f"{CLAIM}B", 3.0, step_s=0.02) | {"gpus": [0]}
        return [one, on_gpu("last", None, 2.0, step_s=0.02) | {"gpus": [last]}]
    from tests.gpu.adapters import write_middle

    path = write_middle(folder / "middle")
    entry = {"path": str(path), "device": "cuda", "options": {"kv_cache_bytes": GIB}}
    return [
        {"name": "first", "gpus": [0], "memory": f"{CLAIM}B", **entry},
        {"name": "last", "gpus": [last], **entry},
    ]


@contextmanager
def streams(url: str, count: int = 4) -> Iterator[list[str]]:
    """Streams to both models without a pause; what failed of them is in the list."""
    failed: list[str] = []
    over = threading.Event()

    def client(number: int) -> None:
        body = {
            "model": ("first", "last")[number % 2],
            "prompt": f"{number} words and more of them",
            "max_tokens": 64,
            "ignore_eos": True,
            "stream": True,
        }
        while not over.is_set():
            try:
                with httpx.stream(
                    "POST", f"{url}/v1/completions", json=body, headers=AUTH, timeout=120
                ) as answer:
                    last = [line for line in answer.iter_lines() if line][-1]
                if answer.status_code != 200 or last != "data: [DONE]":
                    failed.append(last)
            except (httpx.HTTPError, IndexError) as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        over.set()
        for thread in threads:
            thread.join()


# ---------------------------------------------------------------- rows


def by_worker(watched: Watched) -> None:
    """What /metrics, `ps` and the dashboard say each worker holds, and where."""
    for name, at in (("first", 0), ("last", -1)):

        def in_metrics(worker: str = f"{name}/0", at: int = at) -> tuple[object, bool]:
            seen, pid = watched.gpus.look(), watched.instance.replica(worker).pid
            truth = watched.gpus.of_group(pid)
            own = seen[at].uuid
            shown = {
                uuid: int(value)
                for (metric, of, uuid), value in watched.metrics().items()
                if (metric, of) == ("servekit_worker_gpu_memory_bytes", worker)
            }
            ok = set(truth) == set(shown) == {own} and near(truth[own], shown[own])
            return f"{mib(shown)}; NVML {mib(truth)}", ok

        watched.until(f"/metrics: {name}/0 holds, on its own GPU only", in_metrics)

    def in_ps() -> tuple[object, bool]:
        found, ok = [], True
        replicas = [one for model in watched.ps()["models"] for one in model["replicas"]]
        for one in replicas:
            truth = watched.gpus.of_group(one["pid"])
            shown = dict(zip(one["gpus"], one["held_bytes"], strict=True))
            ok &= shown.keys() == truth.keys() and all(near(shown[u], truth[u]) for u in truth)
            ok &= pin(one["pid"]) == ",".join(one["gpus"])
            found.append(f"{one['name']} pid {one['pid']} {mib(shown)}")
        return "; ".join(found), ok and len(replicas) == 2

    watched.until("ps --json: PIDs, pins and bytes are NVML's", in_ps)


def strays(watched: Watched) -> None:
    found = {
        key: value
        for key, value in watched.metrics().items()
        if key[0] == "servekit_worker_gpu_memory_stray_bytes"
    }
    expected = 2 * (len(watched.gpus.look()) - 1)
    shown = f"{sum(found.values()):.0f} B in {len(found)} series"
    watched.row("/metrics: stray bytes of workers", shown, not any(found.values()) and
                len(found) == expected)  # fmt: skip


def by_gpu(watched: Watched) -> None:
    """Total, used and how busy: /metrics, `ps`."""

    def total() -> tuple[object, bool]:
        shown = of_metric(watched, "servekit_gpu_memory_total_bytes")
        truth = {gpu.uuid: gpu.total for gpu in watched.gpus.look()}
        ok = shown.keys() == truth.keys() and all(near(shown[u], truth[u]) for u in truth)
        return mib(shown), ok

    def used() -> tuple[object, bool]:
        shown = of_metric(watched, "servekit_gpu_memory_used_bytes")
        truth = {gpu.uuid: gpu.used for gpu in watched.gpus.look()}
        ok = shown.keys() == truth.keys() and all(near(shown[u], truth[u]) for u in truth)
        return f"{mib(shown)}; NVML {mib(truth)}", ok

    def busy() -> tuple[object, bool]:
        told = {gpu["uuid"]: gpu["utilisation"] for gpu in watched.ps()["gpus"]}
        found = watched.metrics().items()
        shown = {
            uuid: v for (name, _, uuid), v in found if name == "servekit_gpu_utilization_ratio"
        }
        look = watched.gpus.look()
        seen = {gpu.uuid: gpu.busy for gpu in look}
        ends = [look[0].uuid, look[-1].uuid]
        text = (
            f"/metrics {list(shown.values())}, ps {list(told.values())}, NVML {list(seen.values())}"
        )
        return text, all(told.get(u) and shown.get(u) and seen[u] for u in ends)

    watched.until("/metrics: each GPU's memory", total)
    watched.until("/metrics: used of each", used)
    watched.until("/metrics, ps, NVML: both GPUs are busy under streams", busy)


def of_metric(watched: Watched, name: str) -> dict[str, int]:
    found = watched.metrics().items()
    return {uuid: int(value) for (metric, _, uuid), value in found if metric == name}


def on_dashboard(watched: Watched) -> None:
    """Its GPUs: workers with their bytes, how full, how busy."""

    def probe() -> tuple[object, bool]:
        cards = [read_card(html) for html in gpu_cards(watched)]
        seen = watched.gpus.look()
        ok = [card.index for card in cards] == [gpu.index for gpu in seen]
        for card, gpu in zip(cards, seen, strict=False):
            ok &= abs(card.used - gpu.used) < NEAR_BYTES + 0.05 * GIB  # it shows tenths
            names = {0: ["first/0"], seen[-1].index: ["last/0"]}.get(gpu.index, [])
            ok &= [name for name in card.held if name != "others"] == names
            ok &= all(
                abs(card.held[n] - holds(watched, n, gpu)) < NEAR_BYTES + 0.05e9 for n in names
            )
            ok &= not names or 0 < card.busy <= 100
        return "; ".join(map(str, cards)), ok

    watched.until("dashboard: each GPU by worker, full and busy", probe)


def holds(watched: Watched, worker: str, gpu: Seen) -> int:
    return watched.gpus.of_group(watched.instance.replica(worker).pid).get(gpu.uuid, 0)


def in_top(watched: Watched) -> None:
    """`servekit top`, printed once and drawn on a terminal: workers with their GPU memory."""

    def wanted(text: str) -> tuple[object, bool]:
        lines = [line for line in text.splitlines() if re.match(r"\s*GPU \d", line)]
        ok = True
        for worker, at in (("first/0", 0), ("last/0", -1)):
            gpu = watched.gpus.look()[at]
            shown = re.search(rf"GPU {gpu.index} .*{worker} ([\d.]+) ([MG]iB)", "\n".join(lines))
            unit = {"MiB": MIB, "GiB": GIB}[shown[2]] if shown else 0
            size = float(shown[1]) * unit if shown else 0.0
            ok &= abs(size - holds(watched, worker, gpu)) < NEAR_BYTES + 0.05 * GIB
        return " / ".join(re.sub(r"[█░]+", "", line).strip() for line in lines), ok

    watched.until(
        "servekit top --once",
        lambda: wanted(watched.save("top-once.txt", watched.command("top", "--once"))),
    )
    watched.until(
        "servekit top on a terminal",
        lambda: wanted(watched.save("top.txt", frame(watched.run_dir))),
    )


def somebody_else(watched: Watched) -> None:
    """Another program on GPU 0: not a worker's, and shown as another's, until it ends."""
    before = read_card(gpu_cards(watched)[0]).held.get("others", 0.0)
    free = watched.gpus.look()[0].free
    none_before = of_others(watched, watched.metrics())
    with stranger(watched.gpus, STRANGER_BYTES) as pid:
        size = watched.gpus.look()[0].held.get(pid, 0)
        watched.row("another program on GPU 0, by NVML", f"pid {pid}: {size / MIB:.0f} MiB",
                    size >= STRANGER_BYTES)  # fmt: skip

        def seen() -> tuple[object, bool]:
            now = watched.metrics("metrics-stranger.txt")
            shown = of_others(watched, now)
            return f"{shown / MIB:.0f} MiB held by no worker", shown >= size - NEAR_BYTES

        def shown() -> tuple[object, bool]:
            card = read_card(gpu_cards(watched, "dashboard-stranger")[0])
            more = card.held.get("others", 0.0) - before
            return str(card), more >= size - NEAR_BYTES - 0.1e9

        watched.until("… /metrics: used of GPU 0, less what workers hold", seen)
        watched.until("… dashboard: others", shown)
        watched.save("top-stranger.txt", watched.command("top", "--once"))
        strays(watched)

    def gone() -> tuple[object, bool]:
        left = read_card(gpu_cards(watched, "dashboard-after")[0]).held.get("others", 0.0)
        of_none = of_others(watched, watched.metrics("metrics-after.txt"))
        ok = left <= before + 0.1e9 and of_none <= none_before + NEAR_BYTES
        given_back = watched.gpus.look()[0].free >= free - 4 * NEAR_BYTES
        return f"others {left / GIB:.1f} GiB; {of_none / MIB:.0f} MiB of none", ok and given_back

    watched.until("… gone from both when it ends", gone)


def of_others(watched: Watched, now: dict[tuple[str, str, str], float]) -> float:
    """Bytes of GPU 0 that no worker holds, by /metrics alone."""
    here = watched.gpus.look()[0].uuid
    of_workers = ("servekit_worker_gpu_memory_bytes", "servekit_worker_gpu_memory_stray_bytes")
    held = sum(v for (name, _, uuid), v in now.items() if uuid == here and name in of_workers)
    return now.get(("servekit_gpu_memory_used_bytes", "", here), 0.0) - held


def claimed(watched: Watched) -> None:
    found = of_metric(watched, "servekit_worker_gpu_memory_claimed_bytes")
    first = watched.gpus.look()[0].uuid
    watched.row("/metrics: claimed by first/0", mib(found), found.get(first) == CLAIM)


def near(one: int, other: int) -> bool:
    return abs(one - other) <= NEAR_BYTES


def mib(found: dict[str, int]) -> str:
    return " ".join(f"{uuid[:8]} {size / MIB:.0f} MiB" for uuid, size in found.items()) or "nothing"


def pin(pid: int) -> str:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((p[21:].decode() for p in pairs if p.startswith(b"CUDA_VISIBLE_DEVICES=")), "unset")


# ---------------------------------------------------------------- all of it


def run(args: argparse.Namespace, folder: Path, found: Gpus, table: Table) -> None:
    entries = models(args.device, folder, len(found.look()) - 1)
    sections = {"keys": [{"name": "boss", "hash": HASH, "admin": True}]}
    with (
        table.section("the instance", folder / "up.log", folder / "run" / "logs"),
        Instance.up(folder, entries, server={"ui": HAS_UI}, sections=sections) as instance,
    ):
        looks(Watched(instance, found, table, args.keep))


def looks(watched: Watched) -> None:
    instance, began = watched.instance, time.monotonic()
    watched.url = instance.until_settled(within_s=180).url
    states = {
        one.name: (one.state, one.reason) for m in instance.status().models for one in m.replicas
    }
    ready = all(state == "ready" for state, _ in states.values())
    watched.row("both models serve after", f"{time.monotonic() - began:.1f} s", ready)
    if not ready:
        raise AssertionError(str(states))
    with streams(watched.url) as failed:
        by_worker(watched)
        claimed(watched)
        strays(watched)
        by_gpu(watched)
        if HAS_UI:
            instance.until("the UI is up", lambda: ui_is_up(watched), 120)
        else:
            watched.row("dashboard: Gradio is not installed; made from its data", "")
        on_dashboard(watched)
        in_top(watched)
        somebody_else(watched)
    watched.row("streams that failed meanwhile", f"{len(failed)} {failed[:1]}", not failed)


def ui_is_up(watched: Watched) -> bool:
    return httpx.get(f"{watched.url}/ui/config", headers=AUTH).status_code == 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.watch")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    table, began = Table(), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="servekit-gpu-") as name,
        gpus(args.device, Path(name)) as found,
    ):
        if len(found.look()) < 2:
            table.row("two GPUs", "not here", ok=False)
            return 1
        run(args, Path(name), found, table)
    table.row("all of it took", f"{time.monotonic() - began:.0f} s")
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
