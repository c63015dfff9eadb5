"""The tables of a plan and of a running instance, as they stand in a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace as replace_fields
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from servekit.cli.display import tables
from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.control.admin_messages import ModelTraffic
from servekit.protocol.messages import (
    GatewayStatus,
    ModelInfo,
    Preset,
    Progress,
    ReplicaStatus,
)
from servekit.protocol.residency import ResidencyStatus
from servekit.protocol.types import ScaleStatus
from servekit.supervisor.deployments.plan import Plan, Source
from servekit.system.gpu.gpus import Gpu
from tests.unit.cli.instance import make_model, make_replica, make_status
from tests.unit.engines.origins import write_tiny_gguf

MIB = 2**20
GPUS = tuple(Gpu(n, f"GPU-{n}", "H100", 80 * 2**30, 80 * 2**30) for n in range(2))


def shown(renderables: Iterable[RenderableType]) -> list[list[str]]:
    """The lines, without colours, as lists of cells; cells are two spaces apart."""
    console = Console(width=200, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    lines = captured.get().splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def find_line(lines: list[list[str]], first: str) -> list[str]:
    return next(line for line in lines if line[:1] == [first])


def make_plan(tmp_path: Path, text: str, gpus: tuple[Gpu, ...] = ()) -> Plan:
    path = tmp_path / "servekit.yaml"
    path.write_text(text)
    return Source(path, {}, False).plan(gpus)


# ---------------------------------------------------------------- a plan


def test_a_plan_shows_each_worker_and_that_there_is_no_gpu(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "models: [{name: a, engine: echo, replicas: 2}]")
    lines = shown(tables.plan_tables(plan))
    assert lines[0] == ["WORKER", "ENGINE", "DEVICE", "THREADS", "DTYPE", "PATH"]
    assert [line[0] for line in lines[1:3]] == ["a/0", "a/1"]
    assert lines[1][1:3] == ["echo", "cpu"]
    assert lines[-1] == ["no NVIDIA GPU found"]
    assert [line[0] for line in lines if line[0].isupper()] == ["WORKER"], "no other table"


def test_a_plan_shows_presets_adapters_and_models_that_are_not_loaded_at_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "poet").mkdir()
    (tmp_path / "poet" / "adapter_config.json").write_text("{}")
    text = f"""
models:
  - {{name: a, engine: echo, load: on_demand,
     presets: [{{name: calm, sampling: {{temperature: 0}}}}]}}
  - {{name: b, engine: echo, adapters: [{{name: poet, path: {tmp_path}/poet}}]}}
"""
    lines = shown(tables.plan_tables(make_plan(tmp_path, text)))
    assert lines[0][:3] == ["WORKER", "LOAD", "ENGINE"]
    assert find_line(lines, "a/0")[1:3] == ["on_demand", "echo"]
    assert find_line(lines, "b/0")[1:3] == ["on_start", "echo"]
    assert find_line(lines, "calm")[:2] == ["calm", "a"]
    assert ["ADAPTER", "MODEL", "PATH"] in lines and ["poet", "b", f"{tmp_path}/poet"] in lines


def test_a_plan_shows_the_gpus_and_which_are_idle(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    text = f"models: [{{name: a, engine: transformers, path: {tmp_path}/m, gpus: [1]}}]"
    plan = make_plan(tmp_path, text, GPUS)
    lines = shown(tables.plan_tables(plan))
    told = lines[-1][0].split("; ")
    assert told == [f"{GPUS[0]}, idle", str(GPUS[1])]
    assert find_line(lines, "a/0")[2].startswith("GPU 1")


def test_the_memory_of_models_on_the_cpu_is_the_hosts(tmp_path: Path) -> None:
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    text = f"""
models:
  - {{name: a, engine: llamacpp, path: {weights}, device: cpu}}
  - {{name: b, engine: llamacpp, path: {weights}, device: cpu, memory: 1GiB}}
"""
    plan = make_plan(tmp_path, text)
    lines = shown(tables.plan_tables(plan))
    assert find_line(lines, "a/0")[3].isdecimal(), "its threads"
    assert find_line(lines, "a/0")[4:] == ["auto", str(weights)]
    head = ["MODEL", "WEIGHTS", "KV / 1K TOKENS", "CONTEXT", "LEAST", "CLAIM", "NOTE"]
    assert find_line(lines, "MODEL") == head
    assert find_line(lines, "a")[1:] == ["82 KiB", "256 KiB", "256", "146 KiB", "-"]
    assert find_line(lines, "b")[-1] == "1.0 GiB"
    room = "1.0 GiB have room for the weights and these requests: 16382 of 256 tokens"
    assert [f"b: {room}"] in lines
    assert [line.plain for line in tables.fit_lines(plan, ["b"])] == [f"b: {room}"]


def test_the_memory_of_models_on_gpus_is_that_of_each_gpu(tmp_path: Path) -> None:
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    text = f"models: [{{name: a, engine: llamacpp, path: {weights}, gpus: [0], memory: 4GiB}}]"
    lines = shown(tables.plan_tables(make_plan(tmp_path, text, GPUS)))
    assert find_line(lines, "a/0")[2:4] == ["GPU 0 (H100)", "auto"], "threads do not matter"
    assert find_line(lines, "MODEL")[4:6] == ["LEAST PER GPU", "CLAIM PER GPU"]
    assert any(line[0].startswith("a: 4.0 GiB of GPU 0 (H100) have room for ") for line in lines)


def test_weights_that_cannot_fit_are_told(tmp_path: Path) -> None:
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    text = f"models: [{{name: a, engine: llamacpp, path: {weights}, device: cpu, memory: 1GiB}}]"
    plan = make_plan(tmp_path, text)

    def told(weights_bytes: int, *, partly: bool = False) -> list[str]:
        """What is said of that many bytes; `partly`: the rest may stay in the host's memory."""
        found = plan.estimates["a"]
        found = replace_fields(found, on_each_weights_bytes=weights_bytes, partly=partly)
        lines = tables.fit_lines(replace_fields(plan, estimates={"a": found}))
        return [line.plain for line in lines]

    said = "a: its weights alone take more than the 1.0 GiB that there are"
    assert told(2**30 + 1) == [f"{said}; choose a smaller or quantised model"]
    assert told(2**30) == [], "they fit, with nothing else"
    assert told(2**40, partly=True) == []


def test_with_ray_the_gpus_are_the_clusters(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "{launcher: ray, models: [{name: a, engine: echo}]}")
    lines = shown(tables.plan_tables(plan))
    assert lines[-1] == ["GPUs: those of the Ray cluster at auto, which `up` asks for them"]
    assert find_line(lines, "a/0")[2] == "cpu, on a Ray node"


# ---------------------------------------------------------------- a running instance


def test_the_head_says_what_runs_where_since_when() -> None:
    status = replace(make_status(), started_at=time.time() - 3700, rss_bytes=50 * MIB)
    [head] = shown(tables.status_tables(status))[:1]
    assert head == ["servekit 0 · http://127.0.0.1:1 · f.yaml · pid 10 · 50 MiB · up 1 h 1 min"]
    status = replace(status, profile="night", draining=True)
    [head] = shown(tables.status_tables(status))[:1]
    assert head[0].endswith(" · profile night · draining")


def test_a_plain_instance_has_two_tables() -> None:
    heads = [line for line in shown(tables.status_tables(make_status())) if line[0].isupper()]
    assert [head[0] for head in heads] == ["WORKER", "GATEWAY"]


def test_workers_and_standbys_are_shown_with_their_figures() -> None:
    replica = replace(
        make_replica(),
        rss_bytes=2 * MIB,
        gpu_bytes=3072 * MIB,
        claim_bytes=8192 * MIB,
        restarts=3,
        running=4,
        waiting=5,
    )
    standby = replace(make_replica("m/standby"), pid=0)
    status = make_status(replace(make_model("m", replica), standbys=(standby,)))
    lines = shown(tables.status_tables(status))
    worker = find_line(lines, "m/0")
    assert worker == ["m/0", "ready", "11", "cpu", "2 MiB", "3.0 GiB of 8.0 GiB", "3", "4", "5"]
    assert find_line(lines, "m/standby")[1:5] == ["ready", "-", "cpu", "-"]
    assert find_line(lines, "m/standby")[-1] == "forks the next worker"


INFO = ModelInfo(4096, 8, True, "LlamaForCausalLM", "bfloat16", "cpu")


@pytest.mark.parametrize(
    ("replica", "note"),
    [
        (make_replica(), "LlamaForCausalLM bfloat16"),
        (replace(make_replica(), reason="killed by SIGKILL"), "last: killed by SIGKILL"),
        (replace(make_replica("m/0", "failed"), reason="no such folder"), "no such folder"),
        (replace(make_replica("m/0", "backoff"), reason="it crashed"), "it crashed"),
        (replace(make_replica(), progress=Progress("warm-up", 0, 0, "")), "warm-up"),
        (
            replace(make_replica(), progress=Progress("load", 3, 9, "tensors")),
            "load 3 of 9 tensors",
        ),
        (replace(make_replica(), progress=Progress("fork", 1, 2, "")), "fork 1 of 2"),
        (
            replace(make_replica(), progress=Progress("fetch", 12 * MIB, 94 * MIB, "bytes")),
            "fetch 12 MiB of 94 MiB",
        ),
        (
            replace(make_replica(), trouble="its endpoint is down", reason="x"),
            "its endpoint is down",
        ),
        (replace(make_replica(), stray="it holds 1 GB", trouble="x"), "it holds 1 GB"),
        (replace(make_replica(), stray="one", excess="two"), "one; two"),
        (replace(make_replica(), reason="bad\x1b[2J"), "last: bad"),
    ],
)
def test_the_note_says_the_worst_that_there_is_to_say(replica: ReplicaStatus, note: str) -> None:
    assert tables.replica_note(replace(make_model("m", replica), info=INFO), replica) == note


def test_a_model_that_was_never_loaded_has_no_note() -> None:
    assert tables.replica_note(make_model("m"), make_replica()) == ""


def test_gateways_have_a_note_only_where_one_says_something() -> None:
    status = make_status()
    assert "NOTE" not in find_line(shown(tables.status_tables(status)), "GATEWAY")
    gateways = (
        GatewayStatus("gateway/0", 12, "ready", 2, 5 * MIB, 100, 7, reason="killed"),
        GatewayStatus("gateway/1", 0, "failed", reason="its port is taken"),
    )
    lines = shown(tables.status_tables(replace(status, gateways=gateways)))
    first = ["gateway/0", "ready", "12", "5 MiB", "2", "7", "100", "last: killed"]
    assert find_line(lines, "gateway/0") == first
    assert find_line(lines, "gateway/1")[2:] == ["-", "-", "0", "0", "0", "its port is taken"]


def test_models_that_come_and_go_are_shown_with_when_they_leave() -> None:
    resident = ResidencyStatus("on_demand", "resident", "used", idle_s=30.0, leaves_in_s=270.0)
    stopped = ResidencyStatus("manual", "stopped", "not asked\x1b[1m for", idle_s=9.0, waiting=3)
    status = make_status(
        replace(make_model("a"), residence=resident),
        replace(make_model("b"), residence=stopped),
        make_model("c"),
    )
    lines = shown(tables.status_tables(status))
    assert ["MODEL", "STATE", "LOAD", "WAIT", "UNUSED", "LEAVES IN", "NOTE"] in lines
    assert ["a", "loaded", "on_demand", "0", "30 s", "4 min 30 s", "used"] in lines
    assert ["b", "stopped", "manual", "3", "-", "-", "not asked for"] in lines
    assert not any(line[0] == "c" for line in lines)


def test_models_that_scale_are_shown_with_their_queue_and_reason() -> None:
    loading = make_replica("a/1", "loading")
    at = time.time() - 60
    scale = ScaleStatus(1, 4, 2, "scaled up to 2", at, "no GPU is free")
    scaled = replace(make_model("a", make_replica("a/0"), loading), scale=scale)
    never = replace(make_model("b"), scale=ScaleStatus(0, 2, 1))
    status = replace(
        make_status(scaled, never, make_model("c")), traffic=(ModelTraffic("a", 37, 0),)
    )
    lines = shown(tables.status_tables(status))
    said = "scaled up to 2; no GPU is free"
    assert ["a", "1 (1–4)", "37", "1 min 0 s ago", said] in lines
    assert ["b", "1 (0–2)", "0", "-"] in lines
    assert not any(line[0] == "c" for line in lines)
    assert tables.replica_span(make_model("c")) == "1"


def test_presets_say_what_they_set_and_keep_the_system_message_short() -> None:
    both = {"thinking": False, "enable_thinking": False}
    presets = (
        Preset("quick", {"temperature": 0.5}, "You are " + "x" * 300, both),
        Preset("same", {}),
        Preset("odd", {}, template={"thinking": True, "enable_thinking": False}),
    )
    status = make_status(replace(make_model("m"), presets=presets))
    lines = shown(tables.status_tables(status))
    assert ["quick", "m", "temperature 0.5, system message, thinking false"] in lines
    assert ["same", "m", "only its name"] in lines
    assert ["odd", "m", "thinking true, enable_thinking false"] in lines


def test_adapters_are_among_the_tables_of_the_instance() -> None:
    adapter = AdapterStatus("poet", "/poet", "failed", "its base is another")
    status = make_status(replace(make_model("m"), adapters=(adapter,)))
    assert find_line(shown(tables.status_tables(status)), "poet")[-1] == "its base is another"


def test_sizes_of_nothing_are_a_dash() -> None:
    assert tables.format_size(0) == "-"
    assert tables.format_size(2 * MIB) == "2 MiB"


def test_nothing_is_cut_off_and_nothing_is_markup_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables.print_tables("[bold]:smile: " + "x" * 180)
    out = capsys.readouterr().out
    assert out == "[bold]:smile: " + "x" * 180 + "\n"
