"""Workers in Python environments other than servekit's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from servekit.system.procfs import read_variable
from tests.engine_environment import make_environment
from tests.integration.instance import PROGRAM, Instance, echo, stream_completion, write_config
from tests.polling import poll
from tests.unit.engines.origins import SMOLLM2

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("standby", [pytest.param(False, marks=pytest.mark.lane("long")), True])
def test_a_worker_in_another_environment_is_served_and_continued(
    tmp_path: Path, standby: bool
) -> None:
    """It has no package of servekit's own environment, and no more than msgspec of its own."""
    python = make_environment(tmp_path / "env", ["msgspec"])
    model = echo("m", replicas=2, step_s=0.01) | {"python": str(python), "standby": standby}
    with Instance.up(tmp_path, [model, echo("own")]) as instance:
        url = instance.until_settled().url
        replicas = instance.model("m").replicas
        for replica in replicas:
            variables = {
                name: read_variable(replica.pid, name) or ""
                for name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV")
            }
            assert variables["VIRTUAL_ENV"] == str(tmp_path / "env")
            assert variables["PATH"].startswith(f"{tmp_path / 'env' / 'bin'}:")
            seen = "import servekit, structlog, msgspec; import uvicorn"
            asked = subprocess.run(
                [python, "-c", seen], env=variables, capture_output=True, text=True, check=False
            )
            assert "No module named 'uvicorn'" in asked.stderr
        text = ""
        for piece in stream_completion(url, model="m", prompt="abcd", max_tokens=100):
            text += piece
            if len(text) == 10:
                busy = [r for r in instance.model("m").replicas if r.running] or replicas
                os.kill(busy[0].pid, signal.SIGKILL)
        assert text == "abcd" * 25
        instance.until(
            "both replicas are back",
            lambda: all(r.state == "ready" for r in instance.model("m").replicas),
        )


@pytest.mark.lane("long")
def test_a_reload_moves_a_model_to_another_environment(tmp_path: Path) -> None:
    first = make_environment(tmp_path / "first", ["msgspec"])
    second = make_environment(tmp_path / "second", ["msgspec"])
    model = echo("m", step_s=0.01)
    with Instance.up(tmp_path, [model | {"python": str(first)}]) as instance:
        url = instance.until_settled().url
        pid = instance.model("m").replicas[0].pid
        write_config(tmp_path, [model | {"python": str(second)}])
        instance.reload()

        def moved() -> bool:
            now = [r for r in instance.model("m").replicas if r.state == "ready"]
            return any(
                r.pid != pid and read_variable(r.pid, "VIRTUAL_ENV") == str(tmp_path / "second")
                for r in now
            )

        poll("a worker of the second environment serves", moved)
        body = {"model": "m", "prompt": "ab", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


@pytest.mark.lane("long")
def test_an_environment_that_goes_is_the_reason_that_why_gives(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", ["msgspec"])
    with Instance.up(tmp_path, [echo("m") | {"python": str(python)}]) as instance:
        instance.until_settled()
        python.unlink()
        os.kill(instance.model("m").replicas[0].pid, signal.SIGKILL)
        instance.until(
            "the worker cannot be started again",
            lambda: (
                f"there is no Python interpreter {python}" in instance.model("m").replicas[0].reason
            ),
        )


@pytest.mark.lane("packages")
@pytest.mark.timeout(900)
def test_an_engine_is_installed_used_listed_and_removed(tmp_path: Path) -> None:
    """With the package index; what the environment has is all that the engine's worker needs."""
    environ = {"XDG_DATA_HOME": str(tmp_path / "data")}

    def engine(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **environ}
        return subprocess.run(
            [*PROGRAM, "engine", *words], env=env, capture_output=True, text=True, check=False
        )

    made = engine("install", "llamacpp", "--name", "llama")
    assert made.returncode == 0, made.stderr
    assert made.stderr.endswith("`python: llama` in a model's section uses it\n")
    assert "llama is installed already" in engine("install", "llamacpp", "--name", "llama").stderr
    [listed] = json.loads(engine("list", "--json").stdout)
    assert (listed["name"], listed["trouble"]) == ("llama", "")
    assert listed["engines"][0].startswith("xllamacpp 20")
    model = {"name": "m", "engine": "llamacpp", "path": SMOLLM2, "python": "llama"}
    with Instance.up(tmp_path, [model], env=environ) as instance:
        url = instance.until_settled(300).url
        body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 0}, timeout=60)
        assert answer.json()["choices"][0]["text"].startswith(" Paris")
        pid = instance.model("m").replicas[0].pid
        assert f"(PID {pid}): stop them" in engine("remove", "llama").stderr
    assert engine("remove", "llama").stdout == "llama is removed\n"
    assert json.loads(engine("list", "--json").stdout) == []
