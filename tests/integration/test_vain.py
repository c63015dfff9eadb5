"""A start that can come to nothing ends, says why, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.instance import echo, write_config


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
