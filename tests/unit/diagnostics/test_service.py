from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from servekit.config.engines.options import KINDS
from servekit.diagnostics.finding import Finding
from servekit.diagnostics.service import check_instance, check_port, check_service
from servekit.supervisor.process.run_dir import Record
from servekit.system.gpu.gpus import Gpu
from tests.engine_environment import add_package, make_environment
from tests.integration.instance import echo, write_config

NO_CUDA: dict[str, Any] = {"error": "", "cuda": None, "gpus": [], "reason": ""}
GPU = Gpu(0, "GPU-aa", "H100", 80 * 2**30, 80 * 2**30)


def of(area: str, findings: list[Finding]) -> Finding:
    [found] = [finding for finding in findings if finding.area == area]
    return found


def test_a_file_that_is_wrong_is_an_error_and_the_rest_is_told(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("models: [{name: a}]")
    findings = list(check_service(file, tmp_path / "run", (), NO_CUDA))
    found = of("configuration", findings)
    assert found.level == "error" and "path" in found.said
    assert len([finding for finding in findings if finding.area == "disk"]) == 2


def test_a_file_that_is_right(tmp_path: Path) -> None:
    file = write_config(tmp_path, [echo("a", replicas=2)])
    found = of("configuration", list(check_service(file, tmp_path / "run", (), NO_CUDA)))
    assert (found.level, found.said) == ("ok", f"{file}: 2 workers, 0 on GPUs, 2 on the CPU")


@pytest.mark.parametrize(("cuda", "level"), [(None, "error"), ("13.0", "ok")])
def test_a_model_on_a_gpu_needs_a_torch_with_cuda(
    cuda: str | None, level: str, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    model = {"name": "m", "path": "./m", "device": "cuda"}
    findings = check_service(
        write_config(tmp_path, [model]), tmp_path / "run", (GPU,), {**NO_CUDA, "cuda": cuda}
    )
    found = of("configuration", list(findings))
    assert found.level == level, found.said


def test_a_model_with_its_own_environment_needs_no_torch_here(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", ["msgspec"])
    kind = KINDS["transformers"]
    for name in (*kind.modules, *(Requirement(need).name for need in kind.needs)):
        add_package(tmp_path / "env", name, "99.0", name)
    (tmp_path / "m").mkdir()
    model = {"name": "m", "path": "./m", "device": "cuda"}
    for given, level in (({}, "error"), ({"python": str(python)}, "ok")):
        file = write_config(tmp_path, [model | given])
        found = of("configuration", list(check_service(file, tmp_path / "run", (GPU,), None)))
        assert found.level == level, found.said


def test_a_record_that_a_dead_instance_left_is_none(tmp_path: Path) -> None:
    left = Record(os.getpid(), 0.0, "http://127.0.0.1:1", "", "")  # the PID is another process's
    (tmp_path / "supervisor.json").write_text(json.dumps(asdict(left)))
    assert check_instance(tmp_path) is None


def test_a_busy_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = check_port("127.0.0.1", taken.getsockname()[1])
    assert found.level == "error" and "already in use by pid" in found.said
    assert check_port("127.0.0.1", 0).level == "ok"
