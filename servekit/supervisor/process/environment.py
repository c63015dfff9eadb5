"""The environment of each child, built before its interpreter starts; our own is never changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from servekit.config.engines.environments import Environment, adapt_kind, read_environment
from servekit.config.engines.options import KINDS, EngineKind
from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.system.orphan_cleanup import MARK
from servekit.system.python import worker_code

_ALWAYS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, so that indexes in messages agree
    "TOKENIZERS_PARALLELISM": "false",  # a worker may fork helpers after tokenizing
    "PYTHONUTF8": "1",  # libraries and our pages read files as text, whatever the locale is
    "PYTHONUNBUFFERED": "1",  # so that the last line before a crash is not lost
    "GRADIO_ANALYTICS_ENABLED": "False",
}
#: Variables that hold for one machine and are not sent to another.
OF_THIS_MACHINE = frozenset({"CUDA_VISIBLE_DEVICES", MARK})
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def for_worker(
    base: Mapping[str, str],
    assignment: Assignment,
    extra: Mapping[str, str],
    instance: str,
    kind: EngineKind,
    python: Environment | None = None,
    code: Path = Path(),
) -> dict[str, str]:
    """Return a worker's environment: `base`, our constants, the engine's, the model's, the pin.

    `python` is another Python environment that it runs in, `code` the folder of servekit's code for
    it: paths of packages in `base` are of our own environment, and are left out.
    """
    env = {**base, **_ALWAYS, **kind.env}
    if python is not None:
        # programs of the environment are found by name: compilers of kernels start ninja
        programs = (str(Path(python.python).parent), base.get("PATH", os.defpath))
        packages = (str(code), extra.get("PYTHONPATH", ""))
        env |= {"VIRTUAL_ENV": python.prefix, "PATH": os.pathsep.join(programs)}
        extra = {**extra, "PYTHONPATH": os.pathsep.join(filter(None, packages))}
        env.pop("PYTHONHOME", None)
    if assignment.threads is not None:
        env |= dict.fromkeys(THREADS, str(assignment.threads))
    env |= extra
    by_index = kind.pin == "index"  # NVML's index, which is CUDA's by CUDA_DEVICE_ORDER
    pin = ",".join(str(gpu.index) if by_index else gpu.uuid for gpu in assignment.gpus)
    return env | {"CUDA_VISIBLE_DEVICES": pin, MARK: instance}


def for_worker_of(
    model: ModelConfig,
    base: Mapping[str, str],
    assignment: Assignment,
    extra: Mapping[str, str],
    instance: str,
    run_dir: Path,
) -> dict[str, str]:
    """Return the environment of a worker on this machine, in the Python environment of its model.

    Raises OSError if that is gone.
    """
    kind = KINDS[model.engine]
    if model.python is None:
        return for_worker(base, assignment, extra, instance, kind)
    try:
        python = read_environment(Path(model.python))
    except ValueError as error:
        raise OSError(str(error)) from None
    lacking = [name for name in worker_code.BROUGHT if not python.version_of(name)]
    code = worker_code.make_code_folder(run_dir, lacking)
    return for_worker(base, assignment, extra, instance, adapt_kind(kind, python), python, code)


def for_remote_worker(
    base: Mapping[str, str], assignment: Assignment, extra: Mapping[str, str], kind: EngineKind
) -> dict[str, str]:
    """Return the variables to add to the environment of the worker's node, which sets the GPU pin.

    Of our own environment, `base`, the worker gets the thread counts only; they take precedence
    over its share of the node's cores.
    """
    own = {name: base[name] for name in THREADS if name in base}
    assignment = replace(assignment, threads=None) if own else assignment
    env = for_worker({}, assignment, {**own, **extra}, "", kind)
    return {name: env[name] for name in env if name not in OF_THIS_MACHINE}


def for_gateway(base: Mapping[str, str], instance: str) -> dict[str, str]:
    """Return a gateway's environment, which hides all GPUs from it."""
    return {**base, **_ALWAYS, "CUDA_VISIBLE_DEVICES": "", MARK: instance}
