"""`python -m tests.deploy.image`: the Dockerfile's own steps, run in a chroot of Debian's packages.

For where there is no Docker and no registry of images. It takes root, mmdebstrap and some minutes.
The base is Debian bookworm with its Python 3.11, in the place of python:3.11-slim-bookworm, which
is the same Debian. What comes out is started as CMD says, and asked as HEALTHCHECK does; its size
is told, base apart. `--bind PATH` shows a folder of this machine inside, such as one with wheels.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.deploy.dockerfile import ROOT, Instruction, Stage, stages, variables
from tests.polling import poll

_BASE = ["python3", "python3-venv", "python3-dev", "ca-certificates"]
_CONFIG = {"models": [{"name": "a", "engine": "echo", "path": "a"}], "server": {"port": 8000}}


class Root:
    """A root file system in the making: one stage."""

    def __init__(self, path: Path, given: Mapping[str, str], built: Mapping[str, Path]) -> None:
        self.path, self.given, self.built = path, given, built
        self.env = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.args: dict[str, str] = {}
        self.user, self.cwd, self.shell = "0:0", "/", ["/bin/sh", "-c"]

    def make(self, stage: Stage) -> None:
        for step in stage.instructions:
            began = time.monotonic()
            self._do(step)
            if step.word in ("RUN", "COPY"):
                took_s = time.monotonic() - began
                print(f"{took_s:6.1f} s  {step.word} {step.rest[:80]}", flush=True)

    def _do(self, step: Instruction) -> None:
        match step.word:
            case "ARG":
                self.args |= variables(step, self.given)
            case "ENV":
                self.env |= variables(step, {**self.args, **self.env})
            case "SHELL":
                self.shell = step.command
            case "WORKDIR":
                self.cwd = step.rest
                (self.path / self.cwd.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = step.rest
            case "COPY":
                self._copy(step)
            case "RUN":
                self.run([*self.shell, step.rest], self.args).check_returncode()
            case "VOLUME" | "EXPOSE" | "HEALTHCHECK" | "CMD":
                pass
            case other:
                raise SystemExit(f"no idea what {other} does")

    def _copy(self, step: Instruction) -> None:
        *sources, target = step.operands
        origin = self.built.get(step.flags.get("from", ""), ROOT)
        there = self.path / os.path.normpath(Path(self.cwd.lstrip("/")) / target.lstrip("/"))
        if target.startswith("/"):
            there = self.path / target.lstrip("/")
        for source in sources:
            here = origin / source.lstrip("/")
            if here.is_dir():
                ignore = shutil.ignore_patterns("__pycache__") if origin == ROOT else None
                shutil.copytree(here, there, symlinks=True, dirs_exist_ok=True, ignore=ignore)
            else:
                there.mkdir(parents=True, exist_ok=True)
                shutil.copy(here, there)

    def run(
        self, command: list[str], more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        inside = ["chroot", f"--userspec={self.user}", str(self.path), "/usr/bin/env", "-C"]
        return subprocess.run(
            [*inside, self.cwd, *command], env={**self.env, **(more or {})}, check=False
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--into", type=Path, required=True, help="an empty folder, on one disk")
    parser.add_argument("--bind", type=Path, action="append", default=[])
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    if os.environ.get("OF_ITS_OWN") is None:  # its mounts end with it
        own = ["unshare", "--mount", "--fork", "--pid", "--kill-child", "--mount-proc"]
        command = [*own, sys.executable, "-m", "tests.deploy.image", *sys.argv[1:]]
        raise SystemExit(subprocess.call(command, env={**os.environ, "OF_ITS_OWN": "1"}))
    options = parser.parse_args()
    given = dict(one.split("=", 1) for one in options.arg)
    given |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    base = options.into / "base"
    if not base.exists():
        _debootstrap(base)
    built: dict[str, Path] = {}
    for stage in stages((ROOT / "Dockerfile").read_text()):
        root = Root(options.into / stage.name, given, dict(built))
        subprocess.run(["cp", "-a", str(base), str(root.path)], check=True)
        _mount(root.path, options.bind)
        root.env |= {name: v for name, v in given.items() if name.startswith("PIP_")}
        root.make(stage)
        built[stage.name] = root.path
    _tell_size(base, root.path / "opt" / "servekit")
    raise SystemExit(_serve(root, stage))


def _debootstrap(base: Path) -> None:
    include = f"--include={','.join(_BASE)}"
    command = ["mmdebstrap", "--variant=minbase", "--mode=root", include, "bookworm", str(base)]
    subprocess.run(command, check=True)
    (base / "usr/local/bin/python").symlink_to("/usr/bin/python3")


def _mount(root: Path, binds: list[Path]) -> None:
    for bind in (Path("/proc"), Path("/dev"), Path("/etc/resolv.conf"), *binds):
        there = root / str(bind).lstrip("/")
        if bind.is_dir():
            there.mkdir(parents=True, exist_ok=True)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.touch()
        subprocess.run(["mount", "--rbind", str(bind), str(there)], check=True)


def _tell_size(base: Path, made: Path) -> None:
    def size(path: Path) -> int:
        done = subprocess.run(["du", "-sxm", str(path)], capture_output=True, text=True, check=True)
        return int(done.stdout.split()[0])

    print(f"the base {size(base)} MB (as of Debian's packages), and {size(made)} MB of ours")


def _serve(root: Root, stage: Stage) -> int:
    """Start what CMD says, until HEALTHCHECK's own command is content; 0 if it ever is."""
    (root.path / "config.yaml").write_text(json.dumps(_CONFIG))
    inside = ["chroot", f"--userspec={root.user}", str(root.path), "/usr/bin/env", "-C", root.cwd]
    env = {**root.env, "SERVEKIT_INSECURE": "1"}
    process = subprocess.Popen([*inside, *stage.last("CMD").command], env=env)
    try:
        poll("it is healthy", lambda: root.run(stage.last("HEALTHCHECK").command).returncode == 0)
        print("healthy")
        return 0
    except AssertionError as error:
        print(error)
        return 1
    finally:
        process.terminate()
        print(f"exit code {process.wait(60)} after SIGTERM")


if __name__ == "__main__":
    main()
