"""Models that come from a wheel which is not here yet: can it be fetched?

For `servekit check` and `servekit doctor`. Each index is asked in a process of its own, with the
worker's environment and for a few seconds at most, since neither imports an engine.
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

#: For all of them, which are asked at once.
PATIENCE_S = 8.0
_ENGINES = {"transformers", "vllm", "llamacpp"}  # another package's may fetch in a way of its own


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of one model's wheel; an error is one of the file, a warning is not."""

    place: str  # in the file
    level: Literal["ok", "warning", "error"]
    said: str


def look_up(plan: Plan, patience_s: float = PATIENCE_S) -> list[Told]:
    """Ask for each model whose wheel is not cached; without such, nothing is started."""
    if plan.config.launcher == "ray":  # they are fetched on other machines
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
        return [Told(one[0], *answer) for one, answer in zip(asked, answers, strict=True)]


def _ask(
    requirement: str, environ: Mapping[str, str], patience_s: float
) -> tuple[Literal["ok", "warning", "error"], str]:
    command = [*python_command.module("servekit.engines.model_files.wheel_probe"), requirement]
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
