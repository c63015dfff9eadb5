"""Python environments of workers: servekit's own, and those that a model's `python` names.

A worker in another environment runs servekit's own code there (`system.python.worker_code`), so
that environment needs the engine, and the few packages of `EngineKind.needs`, but not servekit.
`servekit engine install` makes such environments below the data folder; each has a manifest, which
is written last: an environment without one is not finished.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from servekit.config import paths
from servekit.config.engines.installed import (
    Machine,
    describe_module,
    find_module,
    find_origin,
    is_there,
)
from servekit.config.engines.options import KINDS, EngineKind, is_cpu_build
from servekit.config.schema import ModelConfig
from servekit.system.python.installation import package_version
from servekit.system.user_dirs import find_engines_folder

#: Marks a finished environment of `servekit engine install`, and says how it was made.
MANIFEST = "servekit.json"
#: The oldest Python that runs servekit's workers.
OLDEST = (3, 11)
#: Timeout of a probe: an interpreter that starts from a cold disk.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment of a worker; `python` is "" for servekit's own."""

    python: str = ""
    version: tuple[int, ...] = ()
    prefix: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)  # that engines name: their files
    packages: Mapping[str, str] = field(default_factory=dict)  # versions, by normalised name
    own_has: Callable[[str], bool] = is_there  # whether servekit's own has a module

    def __str__(self) -> str:
        if not self.python:
            return "servekit's own environment"
        return f"{self.python} (Python {'.'.join(map(str, self.version))})"

    def has(self, module: str) -> bool:
        """Return whether the module can be imported there."""
        return module in self.modules if self.python else self.own_has(module)

    def folder_of(self, module: str) -> Path | None:
        """Return the folder with the package of a module; None if it is not there."""
        origin = self.modules.get(module) if self.python else find_origin(module)
        return Path(origin).parents[1] if origin else None

    def version_of(self, package: str) -> str:
        """Return the version of an installed package; "" if it is not installed."""
        return self.packages.get(package, "") if self.python else package_version(package)

    def is_for_cpus(self, kind: EngineKind) -> bool:
        """Return whether its build of the engine is for CPUs."""
        return bool(kind.cpu_package) and is_cpu_build(
            kind.modules[0], kind.cpu_package, self.version_of
        )

    def missing(self, kind: EngineKind) -> list[str]:
        """Return the requirements of servekit's worker and the engine that it does not meet."""
        from packaging.requirements import Requirement  # a slow import

        if not self.python:
            return []
        wanted = [Requirement(text) for text in (*kind.needs, *WORKER_NEEDS)]
        return [
            str(one)
            for one in wanted
            if not (found := self.version_of(one.name)) or not one.specifier.contains(found, True)
        ]


#: What every worker imports, besides the packages that servekit brings with its code.
WORKER_NEEDS = ("msgspec>=0.19",)


def read_environment(python: Path) -> Environment:
    """Return the environment of an interpreter. Raises ValueError with a sentence for the user."""
    if not python.is_file() or not os.access(python, os.X_OK):
        raise ValueError(f"there is no Python interpreter {python}")
    known = _read_environments.get(python)
    if known is not None and known[0] == _state_of(python, known[1]):
        return known[2]
    facts = _probe(python)
    environment = Environment(
        python=str(python),
        version=tuple(facts["version"]),
        prefix=facts["prefix"],
        modules=facts["modules"],
        packages=facts["packages"],
    )
    if environment.version < OLDEST:
        found = ".".join(map(str, environment.version))
        raise ValueError(f"{python} is Python {found}; servekit's workers need 3.11 or later")
    folders = tuple(facts["folders"])
    _read_environments[python] = _state_of(python, folders), folders, environment
    return environment


#: Environments that were read, with the folders of their packages and the state of these.
_read_environments: dict[Path, tuple[object, tuple[str, ...], Environment]] = {}


def _state_of(python: Path, folders: tuple[str, ...]) -> object:
    """Return a value that changes when packages are installed or removed."""
    states = [python.stat().st_mtime_ns]
    for folder in folders:
        try:
            states.append(Path(folder).stat().st_mtime_ns)
        except OSError:  # it is gone
            states.append(0)
    return states


def _probe(python: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("environment_probe.py")
    modules = sorted({module for kind in KINDS.values() for module in kind.modules})
    try:
        done = subprocess.run(
            [python, "-I", script, *modules],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{python} did not answer within {_PATIENCE_S:g} s") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{python} is no Python interpreter that works: {error}") from None
    return found


def find_interpreter(text: str, folder: Path, environ: Mapping[str, str]) -> Path:
    """Return the interpreter that a model's `python` names. Raises ValueError.

    `text` is the name of an environment of `servekit engine install`, an interpreter, or the folder
    of a virtual environment, relative to `folder`. A link is kept: from its place the interpreter
    knows its environment.
    """
    if "/" not in text and (folder_of := find_engines_folder(environ) / text).is_dir():
        if not (folder_of / MANIFEST).is_file():
            raise ValueError(f"the environment {text} is not finished: install it again")
        return folder_of / "bin" / "python"
    path = paths.resolve_path(text, folder)
    if path.is_dir():
        python = path / "bin" / "python"
        if not python.exists():
            raise ValueError(f"{path} is no virtual environment: it has no bin/python")
        return python
    if "/" not in text and not path.exists():
        if (found := shutil.which(text, path=environ.get("PATH"))) is not None:
            return Path(found)
        raise ValueError(
            f"there is no environment {text!r} (`servekit engine list` shows them), "
            f"and no interpreter of that name"
        )
    return path


def list_environments(environ: Mapping[str, str]) -> Iterator[tuple[Path, Environment | str]]:
    """Yield the folders of `servekit engine install` with their environments.

    Of an environment that cannot be used, a sentence stands in its place.
    """
    try:
        folders = sorted(find_engines_folder(environ).glob("[!.]*"))
    except PermissionError:  # another user's home: nothing there can be used
        return
    for folder in folders:
        try:
            if not (folder / MANIFEST).is_file():
                raise ValueError("it is not finished: remove it, or install it again")
            yield folder, read_environment(folder / "bin" / "python")
        except ValueError as error:
            yield folder, str(error)


def engines_of(environment: Environment) -> list[str]:
    """Return the engines of an environment with their versions: ["vllm 0.33.0"]."""
    kinds = [kind for kind in KINDS.values() if find_module(kind, environment.has)]
    return [engine_version(kind, environment) for kind in kinds]


def find_environment(kind: EngineKind, machine: Machine) -> Environment:
    """Return the environment for a model that names none.

    It is the one with the newest engine, of servekit's own and the installed ones; builds for other
    machines are the last choice.
    """
    own = Environment(own_has=machine.has)
    if not kind.modules or machine.environ is None:
        return own
    from packaging.version import InvalidVersion, Version  # a slow import

    def rank(environment: Environment) -> tuple[bool, Version, bool]:
        try:
            version = Version(engine_version(kind, environment).partition(" ")[2] or "0")
        except InvalidVersion:
            version = Version("0")
        fits = not kind.cpu_package or environment.is_for_cpus(kind) != machine.has_gpu
        return fits, version, not environment.python

    there = [own]
    for _, found in list_environments(machine.environ):
        if not isinstance(found, str):
            there.append(found)
    there = [one for one in there if find_module(kind, one.has) and not one.missing(kind)]
    return max(there, key=rank, default=own)


def engine_version(kind: EngineKind, environment: Environment) -> str:
    """Return the package and version of an engine, "vllm 0.33.0"; "" if it is not installed."""
    return describe_module(find_module(kind, environment.has), environment.version_of)


def adapt_kind(kind: EngineKind, environment: Environment) -> EngineKind:
    """Return the kind with the environment's build of the engine, which may be for CPUs."""
    if not environment.python or not kind.cpu_package:
        return kind
    return replace(kind, cpu_build=environment.is_for_cpus(kind))


def find_kind_in_environment(model: ModelConfig) -> EngineKind:
    """Return the kind of a model's engine, as it is in the environment of its workers.

    `python` must be resolved. An interpreter that is gone changes nothing here: the worker reports
    it when it starts.
    """
    kind = KINDS[model.engine]
    if model.python is None or not kind.cpu_package:
        return kind
    try:
        return adapt_kind(kind, read_environment(Path(model.python)))
    except ValueError:
        return kind
