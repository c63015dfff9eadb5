"""The benchmark of the vLLM engine without a GPU: the echo engine in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.bench.crowd import Order, ask
from tests.bench.load import Unexpected
from tests.bench.vllm import PATHS, Load
from tests.integration.instance import Instance, echo

TOKENS = 9
USER = [{"role": "user", "content": "x"}]


@pytest.mark.lane("bench")
def test_it_prints_a_table() -> None:
    sizes = ["--streams", "4", "8", "--prompt", "12", "--output", str(TOKENS), "--rounds", "2"]
    command = [sys.executable, "-m", "tests.bench.vllm", "--engine", "echo", "--clients", "2"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| c")]
    assert [row.split(",")[0] for row in rows] == [
        f"| {kind} streamed through servekit" for _ in (4, 8) for kind in PATHS
    ]


@pytest.mark.lane("bench")
def test_a_crowd_counts_what_the_server_has_made(tmp_path: Path) -> None:
    load = Load(prompt=12, output=TOKENS, repeats=3, vocab=256, clients=2)
    prompts = load.prompts(5, 0, stream=True)
    again, other = (load.prompts(5, number, stream=True) for number in (0, 1))
    assert prompts == again != other != load.prompts(5, 1, stream=False)
    with Instance.up(tmp_path, [echo("m", slots=8)]) as instance:
        port = urlsplit(instance.until_settled().url).port or 0
        for kind, path in PATHS.items():
            for stream in (True, False):
                bodies = load.bodies(kind, prompts, stream=stream)
                found = ask(Order(port, path, bodies, stream), processes=2)
                assert found.tokens == 5 * 3 * TOKENS
                assert len(found.firsts_s) == (5 * 3 if stream else 0)
                assert (found.events >= 5 * 3) is stream
        with pytest.raises(Unexpected, match="404"):
            ask(
                Order(port, PATHS["chat"], [[json.dumps({"model": "x", "messages": USER})]], True),
                1,
            )


@pytest.mark.lane("bench")
def test_the_path_of_a_token_is_told_by_stage() -> None:
    command = [sys.executable, "-m", "tests.bench.vllm_path", "--streams", "8", "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert " µs a token: decode " in done.stdout
