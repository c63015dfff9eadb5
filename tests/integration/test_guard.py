"""The import guard in a real instance: its page works under it, and what breaks it is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.integration.instance import PROGRAM, Instance, echo, write_config


def test_the_chat_page_works_in_a_guarded_gateway(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")], server={"ui": True}) as instance:
        instance.until_settled()
        url = f"{instance.url}/ui/"
        instance.until(
            "Gradio is loaded", lambda: httpx.get(url, timeout=30).is_success, within_s=60.0
        )
        assert "gradio" in httpx.get(url, timeout=30).text
        log = "".join(path.read_text() for path in (tmp_path / "run/logs").glob("gateway*"))
        assert "which stays without CUDA" not in log


def test_a_gateway_that_imports_torch_says_who_did(tmp_path: Path) -> None:
    """A user's own httptools.py, found before the real one, stands for a library gone wrong."""
    (tmp_path / "httptools.py").write_text("import torch")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Instance.up(tmp_path, [echo("a")], env={"PYTHONPATH": path}) as instance:
        log = tmp_path / "run/logs/gateway-0.log"
        said = instance.until(
            "the gateway has died of it",
            lambda: log.exists() and "torch was imported in the gateway" in log.read_text(),
        )
        assert said
        [line] = {x for x in log.read_text().splitlines() if "stays without CUDA" in x}
        assert line.endswith("→ httptools → torch")


def test_a_supervisor_with_torch_in_it_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import torch")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    config = write_config(tmp_path, [echo("a")])
    done = subprocess.run(
        [*PROGRAM, "up", "--config", str(config), "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "torch was imported in the supervisor before its guard\n"
