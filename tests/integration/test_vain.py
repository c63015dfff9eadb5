"""A start that can come to nothing ends, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.instance import Instance, echo, write_config


@pytest.mark.lane("long")
def test_where_no_model_can_be_served_up_ends_with_the_reasons(tmp_path: Path) -> None:
    models = [echo("a", replicas=2, load_error="no such weights"), echo("b", load_error="no room")]
    config = write_config(tmp_path, models)
    command = [sys.executable, "-m", "servekit", "up", "--config", str(config)]
    ended = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last == "no model can be served. a: no such weights b: no room"
    assert "is up" not in ended.stdout
    assert not list((tmp_path / "run").glob("*.sock"))


@pytest.mark.lane("long")
def test_where_no_gateway_can_be_imported_up_ends_with_the_reason(tmp_path: Path) -> None:
    """A user's own httptools.py, found before the real one, stands for a broken installation."""
    (tmp_path / "httptools.py").write_text("raise ImportError('httptools is broken')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    config = write_config(tmp_path, [echo("a")], {"gateways": 2})
    command = [sys.executable, "-m", "servekit", "up", "--config", str(config)]
    ended = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("no gateway can serve. gateway/")
    assert "ImportError: httptools is broken" in last
    assert not list((tmp_path / "run").glob("*.sock"))


@pytest.mark.lane("waits")
def test_a_gateway_that_has_served_is_started_again_for_ever(tmp_path: Path) -> None:
    """One that dies of the same again and again, once another has served, ends nothing."""
    name = "SERVEKIT_TEST_BREAKS_GATEWAYS"
    (tmp_path / "httptools.py").write_text(
        "import os, pathlib, sys\n"
        f"if pathlib.Path(os.environ[{name!r}]).exists(): raise ImportError('broken now')\n"
        "sys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['httptools']\n"
        "import httptools\n"
        "sys.modules['httptools'] = httptools\n"
    )
    broken = tmp_path / "broken"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Instance.up(tmp_path, [echo("a")], env={"PYTHONPATH": path, name: str(broken)}) as up:
        up.until_settled()
        broken.touch()
        os.kill(up.gateway().pid, signal.SIGKILL)
        up.until("it has died often", lambda: up.gateway().restarts >= 7, within_s=120)
        broken.unlink()
        up.until("it serves again", lambda: up.gateway().state == "ready", within_s=60)
