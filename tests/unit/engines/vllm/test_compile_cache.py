"""The key of vLLM's compile cache, as vLLM computes it from its configuration and variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.config.engines.installed import is_there
from servekit.config.engines.options import KINDS
from tests.unit.engines.harness import write_tiny_llama

pytestmark = [
    pytest.mark.lane("vllm"),
    pytest.mark.timeout(900),  # vLLM is imported twice: minutes on a busy machine
    pytest.mark.skipif(not is_there("vllm"), reason="no vLLM"),
]
PROGRAM = """
import json, sys
from pathlib import Path
from vllm import envs
from vllm.config.utils import hash_factors
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from servekit.engines.vllm import engine_args
from servekit.engines.vllm.core import core_client
from servekit.protocol.messages import WorkerSpec

folder, ours = Path(sys.argv[1]), sys.argv[2] == "ours"
if ours:
    spec = WorkerSpec(
        name="m/0", model="m", engine="vllm", path=str(folder), revision=None, device="cuda",
        dtype="auto", max_context=None, trust_remote_code=False, sampling={}, options={}, socket="",
    )
    asked = engine_args.engine_arguments(spec, folder, (80 * 2**30, 80 * 2**30), embeds=False)
    config = core_client.make_config(asked, "m")
else:
    config = EngineArgs(model=str(folder)).create_engine_config(UsageContext.OPENAI_API_SERVER)
print(json.dumps([config.compute_hash(), hash_factors(envs.compile_factors())]))
"""


def keys_of(folder: Path, whose: str, environ: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), whose]
    env = {**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", **environ}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=env)
    assert done.returncode == 0, done.stderr
    keys: list[str] = json.loads(done.stdout.splitlines()[-1])
    return keys


def test_it_is_that_of_vllms_own_server(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", hidden_size=256)
    plain = keys_of(folder, "vllm serve", {})
    assert keys_of(folder, "ours", dict(KINDS["vllm"].env)) == plain
