"""`python -m tests.ordinary_user`: the tests as a user who is not root; run it as root.

    python -m tests.ordinary_user                     # the ordinary run, pytest -n 4
    python -m tests.ordinary_user -n 2 tests/unit     # with other arguments for pytest

Makes the user `tester`, who clones what is committed here, makes an environment with the python3 of
a login, and runs pytest there; then it removes the user. A process that the tests leave behind is a
failure, and is killed.

--keep           leave the user and the clone; the next run brings them up to what is committed
--python PATH    another interpreter that this user may run
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from servekit.engines.model_files.package_index import Settings
from servekit.system import procfs
from tests.interpreters import ROOT
from tests.polling import poll

USER = "tester"
#: As login(1) sets it.
_PATH = "/usr/local/bin:/usr/bin:/bin"
#: Names of variables by which a user reaches package indexes.
_NETWORK = ("PIP_", "NPM_", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ordinary_user")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--python", default="python3")
    args, of_pytest = parser.parse_known_args()
    if os.geteuid() != 0:
        parser.error("only root can make a user; as any other user, run pytest itself")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the user is removed, too
    with ordinary_user(keep=args.keep) as user:
        clone = check_out(user)
        if not (clone / ".venv/bin/pytest").exists():
            install(user, clone, args.python)
        tests = (".venv/bin/python", "-m", "pytest", *(of_pytest or ("-n", "4")))
        code = run_as(user, clone, *tests).returncode
        left = kill_processes(user.pw_uid)
    for process in left:
        print(f"FAILED: it was left behind: {process}", file=sys.stderr)
    return code or int(bool(left))


@contextlib.contextmanager
def ordinary_user(*, keep: bool) -> Iterator[pwd.struct_passwd]:
    """Make the user; remove it, and all that it has, unless it is to be kept."""
    if all(one.pw_name != USER for one in pwd.getpwall()):
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)
    elif not keep:
        raise SystemExit(f"there is a user {USER}: remove it, or use it with --keep")
    user = pwd.getpwnam(USER)
    try:
        yield user
    finally:
        kill_processes(user.pw_uid)
        if not keep:
            remove_user(user)


def remove_user(user: pwd.struct_passwd) -> None:
    """Remove the user, its home and what it has in /tmp: the next user may get its number."""
    subprocess.run(["userdel", "--remove", USER], check=True)
    for path in Path("/tmp").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == user.pw_uid:
                subprocess.run(["rm", "-rf", path], check=True)


def check_out(user: pwd.struct_passwd) -> Path:
    """Clone what is committed here, or bring the clone up to it; return its folder."""
    clone = Path(user.pw_dir) / "clone"
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    git = ("git", "-c", f"safe.directory={clone}", "-C", clone)
    subprocess.run([*git, "fetch", "--quiet", ROOT, "HEAD"], check=True)
    subprocess.run([*git, "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"], check=True)
    subprocess.run(["chown", "--recursive", f"{USER}:", clone], check=True)
    return clone


def install(user: pwd.struct_passwd, clone: Path, python: str) -> None:
    """Make the environment, with the commands of the README."""
    pip = (".venv/bin/pip", "install", "-q", "-c", "deploy/constraints.txt", "-e", ".[test]")
    for command in ((python, "-m", "venv", ".venv"), pip):
        run_as(user, clone, *command).check_returncode()


def run_as(
    user: pwd.struct_passwd, folder: Path, *command: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as the user, with the environment of a login and root's package indexes."""
    print(f"== {USER}: {' '.join(command)}", flush=True)
    return subprocess.run(
        command,
        cwd=folder,
        env=_environment(user),
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        check=False,
    )


def _environment(user: pwd.struct_passwd) -> Mapping[str, str]:
    login = {"HOME": user.pw_dir, "USER": USER, "LOGNAME": USER, "SHELL": user.pw_shell}
    network = {k: v for k, v in os.environ.items() if k.upper().startswith(_NETWORK)}
    found = Settings.from_environ(os.environ)
    indexes = {
        "PIP_INDEX_URL": found.indexes[0],
        "PIP_EXTRA_INDEX_URL": " ".join(found.indexes[1:]),
        "PIP_FIND_LINKS": " ".join(found.find_links),
    }
    return network | indexes | login | {"PATH": _PATH, "LANG": "C.UTF-8", "PIP_COMPILE": "0"}


def kill_processes(uid: int) -> list[str]:
    """SIGKILL the processes of a user and wait for their end; return each as a text."""
    found = [one for one in procfs.all_processes() if _uid(one.pid) == uid]
    told = [f"{one.pid} {procfs.command_line(one.pid, 200)}" for one in found]
    for one in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    poll("they have ended", lambda: not any(procfs.is_alive(p.pid, p.started) for p in found))
    return told


def _uid(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


if __name__ == "__main__":
    sys.exit(main())
