"""Check that models in wheels that are not cached yet can be fetched.

For `servekit check` and `servekit doctor`. A separate process asks the package index, with the
worker's environment and a time limit, since neither command imports an engine.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.scheduling import local_model_files
from servekit.system import python_command

#: Timeout of the queries, which run in parallel.
PATIENCE_S = 8.0
_ENGINES = {"transformers", "vllm", "llamacpp"}  # engines of other packages may fetch differently


@dataclass(frozen=True, slots=True)
class WheelFinding:
    """The finding on one model's wheel. Errors are the configuration's fault, warnings are not."""

    place: str  # in the file
    level: Literal["ok", "warning", "error"]
    said: str


def look_up(plan: Plan, patience_s: float = PATIENCE_S) -> list[WheelFinding]:
    """Query each model whose wheel is not cached; starts no process if there is none."""
    if plan.config.launcher == "ray":  # the wheels are fetched on other machines
        return []
    asked = []
    for index, model in enumerate(plan.config.models):
        environ = {**plan.source.environ, **model.env}
        requirement = local_model_files.wheel(model.path)
        if model.engine not in _ENGINES or not requirement:
            continue
        if local_model_files.find(model.path, model.revision, environ) is None:
            asked.append((f"models[{index}].path: {model.name}", requirement, environ))
    if not asked:
        return []
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda one: _ask(one[1], one[2], patience_s), asked)
        return [WheelFinding(one[0], *answer) for one, answer in zip(asked, answers, strict=True)]


def _ask(
    requirement: str, environ: Mapping[str, str], patience_s: float
) -> tuple[Literal["ok", "warning", "error"], str]:
    command = [
        *python_command.module_command("servekit.engines.model_files.wheel_probe"),
        requirement,
    ]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=patience_s,
            check=True,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        said = f"The package index did not answer for {requirement} within {patience_s:g} s."
        return "warning", said
    except (OSError, ValueError, subprocess.CalledProcessError):
        return "warning", f"The package index could not be asked for {requirement}."
    return answer["level"], answer["said"]
