"""What a reload changes, as a pure function of two files."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.schema import Config, GpusConfig, ModelConfig, ServerConfig
from servekit.config.sections.access import LoggingConfig
from servekit.supervisor.deployments.config_diff import (
    Change,
    Slots,
    changed_sections,
    describe_changes,
    diff,
    needs_restart,
    same_worker,
)
from servekit.supervisor.scheduling.placement import place
from servekit.system.gpu.gpus import Gpu

GPUS = tuple(Gpu(i, f"GPU-{i}", "H200", 100, 100) for i in range(4))


def model(name: str = "a", **keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "path": "p", "engine": "echo", **keys})


def changes(before: list[ModelConfig], after: list[ModelConfig]) -> list[Change]:
    running: dict[str, tuple[ModelConfig, Slots]] = {
        one.name: (one, tuple(p.gpus for p in place(before, (), 4) if p.model == one.name))
        for one in before
    }
    return list(diff(running, after, place(after, (), 4)))


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, "unchanged"),
        ({"aliases": ("b",)}, "updated"),
        ({"presets": [{"name": "x", "sampling": {"temperature": 0.0}}]}, "updated"),
        ({"timeout_s": 5.0}, "updated"),
        ({"max_queue": 5}, "updated"),
        ({"quarantine_s": 5.0}, "updated"),
        ({"stall_timeout_s": 5.0}, "updated"),
        ({"load_timeout_s": 5.0}, "updated"),
        ({"stray_memory": "fail"}, "updated"),
        ({"adapters": [{"name": "x", "path": "/x"}]}, "adapted"),
        ({"adapters": [{"name": "x", "path": "/x"}], "timeout_s": 5.0}, "adapted"),
        ({"adapters": [{"name": "x", "path": "/x"}], "replicas": 3}, "scaled"),
        ({"adapters": [{"name": "x", "path": "/x"}], "path": "q"}, "replaced"),
        ({"replicas": 3}, "scaled"),
        ({"replicas": 3, "timeout_s": 5.0}, "scaled"),
        ({"replicas": 1}, "updated"),
        ({"path": "q"}, "replaced"),
        ({"options": {"slots": 2}}, "replaced"),
        ({"env": {"X": "1"}}, "replaced"),
        ({"sampling": {"temperature": 0.0}}, "replaced"),
        ({"dtype": "float16"}, "replaced"),
        ({"max_context": 64}, "replaced"),
        ({"revision": "main"}, "replaced"),
        ({"replicas": 3, "path": "q"}, "replaced"),
    ],
)
def test_what_becomes_of_a_model(keys: dict[str, object], kind: str) -> None:
    (change,) = changes([model()], [model("a", **keys)])
    # `replicas: 1` where `auto` had meant one: nothing to do, whatever it is called
    assert change.kind == ("unchanged" if kind == "updated" and "replicas" in keys else kind)


def test_a_replica_that_is_to_be_on_another_gpu_moves() -> None:
    """The number of replicas is the same before and after."""
    before = gpu_model("a", replicas=1, gpus=[0])
    after = gpu_model("a", replicas=1, gpus=[2])
    held: dict[str, tuple[ModelConfig, Slots]] = {"a": (before, ((GPUS[0],),))}
    [change] = diff(held, [after], place([after], GPUS, 4, {"a": [(GPUS[0],)]}))
    assert change == Change("a", "scaled", 1, 1)
    assert str(change) == "a moved"


def test_every_key_of_a_model_is_sorted_one_way_or_the_other() -> None:
    """A key that is new must be thought of: by default its workers are replaced."""
    assert not same_worker(model(), model(trust_remote_code=True))
    assert not same_worker(model(), model(device="cpu"))
    assert same_worker(model(), model(replicas=2, aliases=("z",)))


def test_models_that_come_and_go() -> None:
    told = changes([model("a"), model("b", replicas=2)], [model("c", replicas=2), model("a")])
    assert [(one.name, one.kind, one.before, one.after) for one in told] == [
        ("c", "added", 0, 2),
        ("a", "unchanged", 1, 1),
        ("b", "removed", 2, 0),
    ]
    assert describe_changes(told) == "c added with 2 replicas, a unchanged, b removed"


def test_it_is_told_in_words() -> None:
    after = [model("a", path="q", replicas=3), model("b", replicas=2), model("c", max_queue=9)]
    told = changes([model("a", replicas=2), model("b"), model("c")], after)
    assert (
        describe_changes(told) == "2 replicas of a replaced by 3, b scaled from 1 to 2, c updated"
    )
    assert describe_changes(changes([model()], [model()])) == "nothing to change"
    adapted = model(adapters=[{"name": "x", "path": "/x"}])
    assert describe_changes(changes([model()], [adapted])) == "adapters of a changed"


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({}, ""),
        ({"drain_timeout_s": 3.0}, ""),
        ({"runtime_adapters": True, "open_metrics": True, "prefix_cache": "shared"}, ""),
        ({"default_model": "a", "unknown_parameters": "refuse"}, ""),
        ({"port": 81}, "server.port: a change of it needs a restart"),
        ({"ui": False, "gateways": 2}, "server.gateways, server.ui: a change"),
        ({"max_body_bytes": 2048}, "server.max_body_bytes"),
        ({"host": "0.0.0.0", "drain_timeout_s": 1.0}, "server.host"),
    ],
)
def test_what_only_a_restart_changes(server: dict[str, object], words: str) -> None:
    old = Config(models=(model(),))
    new = Config(models=(model(),), server=ServerConfig.model_validate(server))
    assert words in needs_restart(old, new)
    assert bool(words) == bool(needs_restart(old, new))


def test_another_reserve_needs_a_restart() -> None:
    new = Config(models=(model(),), gpus=GpusConfig(reserve="2GiB"))
    assert needs_restart(Config(models=(model(),)), new).startswith("gpus.reserve: a change")


def test_another_format_of_the_log_needs_a_restart() -> None:
    new = Config(models=(model(),), logging=LoggingConfig(format="json"))
    assert needs_restart(Config(models=(model(),)), new).startswith("logging.format: a change")


def test_what_changed_beside_the_models_is_told() -> None:
    old = Config(models=(model(),))
    server = ServerConfig.model_validate({"drain_timeout_s": 3.0})
    new = Config(models=(model(),), server=server, profiles={"p": ("a",)})
    assert changed_sections(old, old, access=False) == []
    assert changed_sections(old, new, access=False) == ["server", "profiles"]
    assert changed_sections(old, new, access=True) == ["access", "profiles"]
    same = changes([model()], [model()])
    assert describe_changes(same, (), ["server"]) == "server changed, a unchanged"


def test_another_run_directory_needs_a_restart() -> None:
    old, new = Config(models=(model(),)), Config(models=(model(),), run_dir=Path("/elsewhere"))
    assert needs_restart(old, new).startswith("run_dir")


# ---------------------------------------------------------------- GPUs


def gpu_model(name: str, **keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "path": "p", "device": "cuda", **keys})


def placed(
    models: list[ModelConfig], held: dict[str, list[Gpu]] | None = None
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for spot in place(
        models, GPUS, 4, {name: [(gpu,) for gpu in own] for name, own in (held or {}).items()}
    ):
        [gpu] = spot.gpus
        found.setdefault(spot.model, []).append(gpu.index)
    return found


def test_a_model_keeps_the_gpus_that_it_has() -> None:
    held = {"a": [GPUS[3]], "b": [GPUS[1], GPUS[2]]}
    models = [gpu_model("a", replicas=1), gpu_model("b", replicas=2), gpu_model("c", replicas=1)]
    assert placed(models, held) == {"a": [3], "b": [1, 2], "c": [0]}


def test_one_with_auto_gives_up_what_another_must_have() -> None:
    held = {"a": [GPUS[0], GPUS[1], GPUS[2], GPUS[3]]}
    told = placed([gpu_model("a"), gpu_model("b", replicas=2)], held)
    assert len(told["a"]) == len(told["b"]) == 2
    assert 0 in told["a"]


def test_one_that_need_not_move_does_where_another_could_not_be_placed() -> None:
    told = placed(
        [gpu_model("a", replicas=1), gpu_model("b", replicas=1, gpus=[2])], {"a": [GPUS[2]]}
    )
    assert told["b"] == [2]
    assert told["a"] != [2]


def test_fewer_replicas_stay_where_they_are() -> None:
    assert placed([gpu_model("a", replicas=2)], {"a": [GPUS[3], GPUS[1], GPUS[2]]}) == {"a": [1, 3]}


def test_adapters_that_are_tried_again_are_told_of() -> None:
    same = Change("a", "unchanged", 1, 1)
    assert describe_changes([same]) == "nothing to change"
    assert describe_changes([same], ["a"]) == "adapters of a loaded again"
