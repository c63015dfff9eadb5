"""GPUs of the nodes of a real Ray cluster: NVML is made up on each, all else is not.

Two nodes have two GPUs by NVML, of which Ray has one to give, so that there is one to stray to; a
third node has no NVML.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets import machine_tables
from servekit.system import procfs
from tests.integration.instance import Instance, echo, write_config
from tests.integration.made_up_gpus import GIB, MadeUpGpus, on_gpu
from tests.integration.ray_nodes import PATIENCE_S, ROOT, Nodes

pytestmark = [
    pytest.mark.lane("ray"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
#: Of one machine, to Ray two.
ADDRESSES = ("127.0.0.2", "127.0.0.3")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(slots=True)
class Cluster:
    """`gpus` is NVML by the node's address."""

    nodes: Nodes
    gpus: dict[str, MadeUpGpus]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with contextlib.ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        folder = Path(tempfile.mkdtemp(prefix="ray"))  # sockets' paths have to be short
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "ray").mkdir()
        # what Ray notes of the newest cluster of the machine is not to be shared with others
        patch.setenv("RAY_TMPDIR", str(folder))
        for name in THREADS:
            patch.delenv(name, raising=False)
        nodes = Nodes(str(folder))
        try:
            made = Cluster(nodes, {})
            for address in ADDRESSES:
                (folder / address).mkdir()
                gpus = MadeUpGpus(folder / address, 2, f"{address}-")
                path = os.pathsep.join([gpus.env["PYTHONPATH"], str(ROOT)])
                more = {"num_gpus": 1, "num_cpus": 3, "node_ip_address": address}
                nodes.add(more, **{**gpus.env, "PYTHONPATH": path})
                made.gpus[address] = gpus
            nodes.add({"num_gpus": 0})
            yield made
        finally:
            nodes.end()


def section(nodes: Nodes) -> dict[str, Any]:
    """Two workers are never on one node: those on GPUs leave the third one for who needs none."""
    own = {"address": nodes.address, "cpus": 2, "grace_s": 60, "connect_s": PATIENCE_S}
    return {"launcher": "ray", "ray": own}


@pytest.fixture(scope="module")
def instance(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    models = [
        on_gpu("told", None, 3.0),
        {**on_gpu("ended", None, 5.0), "stray_memory": "fail"},
        {**echo("plain"), "device": "cpu"},
    ]
    folder, own = tmp_path_factory.mktemp("gpus"), section(cluster.nodes)
    with Instance.begun(folder, models, sections=own) as made:
        made.until("it answers", made.running, PATIENCE_S)
        made.until("all serve", lambda: states(made) == ["ready"] * 3, PATIENCE_S)
        made.until("what they hold is known", lambda: held(made) == [3, 5, 0], PATIENCE_S)
        yield made
        leave(made)


def leave(instance: Instance) -> None:
    """What is killed leaves its gateways, for another supervisor."""
    instance.signal(signal.SIGTERM)
    assert instance.wait(PATIENCE_S) == 0


def states(instance: Instance) -> list[str]:
    return [one.state for model in instance.status().models for one in model.replicas]


def held(instance: Instance) -> list[float]:
    """GiB, by worker."""
    return [one.gpu_bytes / GIB for model in instance.status().models for one in model.replicas]


def node_of(instance: Instance, worker: str) -> str:
    return instance.replica(worker).device.rpartition(" on ")[2]


def environ(pid: int) -> dict[str, str | None]:
    return {name: procfs.read_variable(pid, name) for name in THREADS}


# ---------------------------------------------------------------- what is shown


def test_each_worker_has_the_gpu_that_ray_gave_it_and_what_it_holds(instance: Instance) -> None:
    told, ended, plain = (instance.replica(f"{name}/0") for name in ("told", "ended", "plain"))
    assert {node_of(instance, "told/0"), node_of(instance, "ended/0")} == {*ADDRESSES}
    for one, size in ((told, 3), (ended, 5)):
        node = node_of(instance, one.name)
        assert one.device == f"GPU 0 (made up) on {node}"
        assert (one.gpus, one.held_bytes) == ((f"GPU-{node}-0",), (size * GIB,))
    assert (plain.gpus, plain.held_bytes, plain.gpu_bytes, plain.stray) == ((), (), 0, "")


def test_gpu_0_of_two_nodes_are_two_gpus(instance: Instance) -> None:
    gpus = instance.status().gpus
    assert [(gpu.node, gpu.index, gpu.uuid) for gpu in gpus] == [
        (address, 0, f"GPU-{address}-0") for address in ADDRESSES
    ]
    assert {gpu.node: gpu.used_bytes / GIB for gpu in gpus} == {
        node_of(instance, "told/0"): 3,
        node_of(instance, "ended/0"): 5,
    }
    assert {(gpu.total_bytes, gpu.utilisation) for gpu in gpus} == {(100 * GIB, 0.42)}
    status = instance.status()
    html = machine_tables.render_gpus(status.gpus, status.models, Say("en"))
    shown = command(instance, "top", "--once")
    table = command(instance, "ps")
    for name, size in (("told/0", 3), ("ended/0", 5)):
        node = node_of(instance, name)
        assert f'<h3>GPU 0 <span class="sk-quiet">made up · {node}</span></h3>' in html
        assert f"{name} <b>{size}.0 GiB</b>" in html
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{node} GPU 0 ")]
        assert f" {size}.0 GiB of 100.0 GiB " in line and f"{name} {size}.0 GiB" in line
        (line,) = [line for line in table.splitlines() if line.startswith(name)]
        assert f"GPU 0 (made up) on {node}" in line and f" {size}.0 GiB " in line


def command(instance: Instance, *args: str) -> str:
    whole = [sys.executable, "-m", "servekit", *args, "--run-dir", str(instance.run_dir)]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_metrics_have_the_node(instance: Instance) -> None:
    page = httpx.get(f"{instance.url}/metrics", timeout=60).text.splitlines()
    for name, size in (("told", 3), ("ended", 5)):
        node = node_of(instance, f"{name}/0")
        where = f'node="{node}",uuid="GPU-{node}-0"'
        labels = f'gpu="0",model="{name}",{where},worker="{name}/0"'
        assert value(page, f"servekit_worker_gpu_memory_bytes{{{labels}}}") == size * GIB
        labels = f'gpu="0",name="made up",{where}'
        assert value(page, f"servekit_gpu_memory_total_bytes{{{labels}}}") == 100 * GIB
        assert value(page, f"servekit_gpu_memory_used_bytes{{{labels}}}") == size * GIB
        assert value(page, f"servekit_gpu_utilization_ratio{{{labels}}}") == 0.42
    strays = [line for line in page if line.startswith("servekit_worker_gpu_memory_stray_bytes{")]
    assert len(strays) == 2 and all(line.endswith(" 0.0") for line in strays)


def value(page: list[str], series: str) -> float:
    found = [line for line in page if line.startswith(f"{series} ")]
    assert len(found) == 1, (series, [line for line in page if "_gpu_" in line])
    return float(found[0].rpartition(" ")[2])


# ---------------------------------------------------------------- threads


def test_ray_does_not_say_how_many_threads_a_worker_has(instance: Instance) -> None:
    """On a GPU as many as at home, which is what nobody has said; on the CPU its share."""
    assert environ(instance.replica("told/0").pid) == dict.fromkeys(THREADS)
    assert environ(instance.replica("plain/0").pid) == dict.fromkeys(THREADS, "2")


def test_a_worker_on_the_cpu_of_such_a_node_has_the_users_threads_and_no_gpu(
    cluster: Cluster, tmp_path: Path, instance: Instance
) -> None:
    models, own = [{**echo("more"), "device": "cpu"}], section(cluster.nodes)
    own["ray"]["cpus"] = 0.5  # beside the other instance, which leaves the third node none
    with Instance.begun(tmp_path, models, sections=own, env={"OMP_NUM_THREADS": "3"}) as made:
        made.until("it answers", made.running, PATIENCE_S)
        made.until("it serves", lambda: states(made) == ["ready"], PATIENCE_S)
        worker, node = made.replica("more/0"), node_of(made, "more/0")
        assert (worker.device, worker.gpus) == (f"cpu on {node}", ())
        assert environ(worker.pid) == {**dict.fromkeys(THREADS), "OMP_NUM_THREADS": "3"}
        cluster.gpus[node].hold({worker.pid: 0.5})
        made.until("it is told", lambda: made.replica("more/0").stray, PATIENCE_S)
        stray, gpus = made.replica("more/0").stray, made.status().gpus
        cluster.gpus[node].hold({})
        leave(made)
    both = (f"512 MiB on GPU {index} (made up) on {node}" for index in (0, 1))
    assert stray == f"holds {' and '.join(both)}, which is not its own"
    assert gpus == ()


# ---------------------------------------------------------------- what strays later


def test_memory_that_strays_later_is_told(instance: Instance, cluster: Cluster) -> None:
    before = instance.replica("told/0")
    node = node_of(instance, "told/0")
    cluster.gpus[node].hold({before.pid: 0.5})
    words = f"holds 512 MiB on GPU 1 (made up) on {node}, which is not its own"
    instance.until("it is told", lambda: instance.replica("told/0").stray == words, PATIENCE_S)
    page = httpx.get(f"{instance.url}/metrics", timeout=60).text.splitlines()
    assert (
        value(
            page,
            f'servekit_worker_gpu_memory_stray_bytes{{gpu="1",model="told",node="{node}",'
            f'uuid="GPU-{node}-1",worker="told/0"}}',
        )
        == GIB / 2
    )
    assert words in command(instance, "events")
    # whoever speaks to Ray may die, and the next one measures on
    (speaker,) = (
        one.pid
        for one in procfs.all_processes()
        if one.parent == instance.process.pid
        and "servekit.ray.process" in procfs.command_line(one.pid)
    )
    os.kill(speaker, signal.SIGKILL)
    cluster.gpus[node].hold({})
    instance.until("it is over", lambda: not instance.replica("told/0").stray, PATIENCE_S)
    after = instance.replica("told/0")
    assert (after.pid, after.restarts, after.state) == (before.pid, 0, "ready")


def test_memory_that_strays_later_ends_a_worker_where_the_file_says_so(
    instance: Instance, cluster: Cluster
) -> None:
    before = instance.replica("ended/0")
    node = node_of(instance, "ended/0")
    cluster.gpus[node].hold({before.pid: 0.5})
    instance.until("it has died", lambda: instance.replica("ended/0").restarts == 1, PATIENCE_S)
    cluster.gpus[node].hold({})
    instance.until("all serve", lambda: states(instance) == ["ready"] * 3, PATIENCE_S)
    after = instance.replica("ended/0")
    assert after.pid != before.pid
    assert f"it holds 512 MiB on GPU 1 (made up) on {node}, which is not its own" in after.reason
    instance.until("what it holds is known", lambda: held(instance) == [3, 5, 0], PATIENCE_S)


# ---------------------------------------------------------------- before anything is started


def test_a_check_says_that_ray_gives_the_gpus(tmp_path: Path) -> None:
    models = [on_gpu("big", None, 0.0), {**echo("plain"), "device": "cpu"}]
    sections = {"launcher": "ray", "ray": {"address": "10.0.0.1:6379", "cpus": 3}}
    path = write_config(tmp_path, models, None, sections)
    command = [sys.executable, "-m", "servekit", "check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "big/0 echo 1 GPU of a Ray node auto big" in lines
    assert "plain/0 echo cpu, on a Ray node 3 auto plain" in lines
    assert "no NVIDIA GPU" not in done.stdout
    assert "GPUs: those of the Ray cluster at 10.0.0.1:6379, which `up` asks for them" in lines
