"""Checks that models that are not cached yet can be fetched: from wheels, or as GGUF from the hub.

For `servekit check` and `servekit doctor`. A separate process asks the package index or the hub,
with the worker's environment and a time limit, since neither command imports an engine.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from servekit.config import paths
from servekit.config.schema import ModelConfig
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.scheduling import local_model_files
from servekit.system import python_command

#: Timeout of the queries, which run in parallel.
PATIENCE_S = 8.0
_ENGINES = {"transformers", "vllm", "llamacpp"}  # engines of other packages may fetch differently
#: Repositories without safetensors, by their name.
_GGUF_REPO = re.compile(r"[^/]+/[^/]+-GGUF", re.IGNORECASE)
Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class FetchFinding:
    """The finding on one model's files. Errors are the configuration's fault, warnings are not."""

    index: int  # of the model in the file
    place: str  # the same, in words
    source: Literal["wheel", "hub"]
    level: Level
    said: str


@dataclass(frozen=True, slots=True)
class _Query:
    """A question to a probe."""

    source: Literal["wheel", "hub"]
    name: str  # of what is looked for
    words: tuple[str, ...]  # arguments of the probe
    environ: Mapping[str, str]


_PROBES = {
    "wheel": ("servekit.engines.model_files.wheel_probe", "package index"),
    "hub": ("servekit.engines.model_files.hub_probe", "hub"),
}


def look_up(plan: Plan, patience_s: float = PATIENCE_S) -> list[FetchFinding]:
    """Query each model whose files are not cached; starts no process if there is none."""
    if plan.config.launcher == "ray":  # the files are fetched on other machines
        return []
    asked = {}
    for index, model in enumerate(plan.config.models):
        if query := _make_query(model, {**plan.source.environ, **model.env}):
            asked[index] = query
    if not asked:
        return []
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda query: _run_probe(query, patience_s), asked.values())
        return [
            FetchFinding(
                index, f"models[{index}].path: {plan.config.models[index].name}", source, *answer
            )
            for (index, source), answer in zip(
                [(index, query.source) for index, query in asked.items()], answers, strict=True
            )
        ]


def _make_query(model: ModelConfig, environ: Mapping[str, str]) -> _Query | None:
    """Return the query for a model that has to be fetched; None if there is nothing to ask."""
    if model.engine not in _ENGINES:
        return None
    requirement = local_model_files.wheel(model.path)
    repo, tag = paths.split_tag(model.path)
    if not (requirement or tag or _GGUF_REPO.fullmatch(repo)):
        return None
    if local_model_files.find_model_files(model.path, model.revision, environ) is not None:
        return None
    if requirement:
        return _Query("wheel", requirement, (requirement,), environ)
    return _Query("hub", model.path, (repo, tag, model.revision or ""), environ)


def _run_probe(query: _Query, patience_s: float) -> tuple[Level, str]:
    module, asked = _PROBES[query.source]
    command = [*python_command.module_command(module), *query.words]
    try:
        done = subprocess.run(
            command,
            env=dict(query.environ),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=patience_s,
            check=True,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return "warning", f"The {asked} did not answer for {query.name} within {patience_s:g} s."
    except (OSError, ValueError, subprocess.CalledProcessError):
        return "warning", f"The {asked} could not be asked for {query.name}."
    return answer["level"], answer["said"]
