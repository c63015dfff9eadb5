"""The run directory: one instance's lock, sockets, logs and the record of its processes.

    lock               flock, held while the instance lives; its text is the holder's PID
    supervisor.json    the supervisor: pid, start time, URL, configuration, mark
    children.json      its processes: name, pid, birthmark
    shared_memory.json its children's segments in /dev/shm
    control.sock       the operator's socket
    w1.sock …          one socket per worker incarnation; w1.sock.* is whatever that worker needs
    logs/NAME.log      each child's output: gateway-0.log, MODEL~0.log of the worker MODEL/0
    events.db          the events, of earlier lives too (`supervisor.event_log`)

It belongs to this user alone (0700). The next instance removes what a dead instance left. Without
disk space for its records an instance does not start: nobody could stop or query it.

The default is under XDG_STATE_HOME, so that logs and events survive the user's logout and a reboot.
If that cannot be written, a directory in XDG_RUNTIME_DIR or /tmp replaces it. Files that somebody
removes while the instance lives are created again (`restore`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from servekit.errors import NobodyRuns, StartError
from servekit.system import shared_memory
from servekit.system.orphan_cleanup import CHILDREN, Started, end_leftovers, read_children

#: sockaddr_un.sun_path holds 108 bytes with its NUL (unix(7)).
_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_NAME = "control.sock"
#: Has the profile that `servekit profile` has switched to.
PROFILE = "profile.json"


@dataclass(frozen=True, slots=True)
class Record:
    """The supervisor that runs in a run directory."""

    pid: int
    started_at: float  # Unix time, s
    url: str
    config: str
    mark: str
    boot: str = ""  # the boot ID: PIDs and birthmarks mean nothing after another boot


class InUse(StartError):
    """The error of a run directory that another instance holds."""


def default_paths(environ: Mapping[str, str]) -> list[Path]:
    """Return the default run directories; an instance takes the first that it can use.

    The second is for a home directory that several machines share.
    """
    state = _state_home(environ) / "servekit"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    bases = [Path(runtime)] if runtime and Path(runtime).is_dir() else []
    return [
        state / "default",
        state / f"default@{socket.gethostname()}",
        *(base / "servekit" / "default" for base in (*bases, _fallback_base())),
    ]


def _state_home(environ: Mapping[str, str]) -> Path:
    """Return XDG_STATE_HOME or its default; source: XDG base directory specification.

    Ignores a HOME of another user, which `sudo` may leave to us.
    """
    if (given := Path(environ.get("XDG_STATE_HOME", ""))).is_absolute():
        return given
    home = Path(environ.get("HOME", ""))
    if not home.is_absolute() or not _may_be_ours(home):
        with contextlib.suppress(KeyError):  # a container's user may be missing in its passwd file
            home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    return home / ".local" / "state" if home.is_absolute() else _fallback_base()


def no_instance_error(path: Path) -> NobodyRuns:
    """Return the error of a command that needs an instance when it finds none in `path`."""
    if not may_read(path):
        return NobodyRuns(
            f"the run directory {path} is not ours to read; give the command as its user or as root"
        )
    return NobodyRuns(
        f"no servekit runs in {path}; `servekit up` starts one, --run-dir names another"
    )


def may_read(path: Path) -> bool:
    """Return whether this user may read a directory; true if there is none."""
    try:
        path.stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return os.access(path, os.R_OK | os.X_OK)


def _fallback_base() -> Path:
    return Path(f"/tmp/servekit-{os.getuid()}")


def read_record(path: Path) -> Record | None:
    """Return the record of the supervisor that runs or last ran in `path`, if any."""
    try:
        return Record(**json.loads((path / "supervisor.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def find_switched_profile(run_dir: Path | None, environ: Mapping[str, str], asked: str) -> str:
    """Return the profile to start with, where the command line asks for `asked`.

    That is another one if the last supervisor was started with `asked`, was switched, and did not
    end in an orderly way.
    """
    try:
        path = (run_dir or default_paths(environ)[0]) / PROFILE
        before, switched = json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return asked
    return str(switched) if before == asked else asked


def _may_be_ours(home: Path) -> bool:
    try:
        return home.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return True
    except OSError:
        return False


class RunDir:
    """A run directory that this process holds."""

    def __init__(self, path: Path, lock_fd: int, made: Sequence[Path] = ()) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._made = made  # folders that did not exist before
        self._in_vain = True
        self._record: Record | None = None
        self._sockets = 0
        self.instead_of = ""  # why the first default could not be used
        self.control = path / "control.sock"
        self.logs = path / "logs"

    @classmethod
    def claim(cls, path: Path, *, sweep: bool = True) -> RunDir:
        """Lock the directory and end what a dead instance left. Raises StartError.

        Without `sweep`, the processes of the dead instance run on.
        """
        path = Path(os.path.abspath(path))  # noqa: PTH100  (resolve() would follow a symlink)
        _check_path(path)
        with contextlib.ExitStack() as undo, _explain_disk_errors(path):
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            undo.callback(_remove_empty, made)
            _make_private(path)
            taken = cls(path, _lock(path), made)
            undo.callback(taken._release)  # what a dead instance left is for the next start to end
            taken._sign()
            _check_sockets(path)
            if sweep:
                taken._sweep()
            taken._clear()
            taken.logs.mkdir(mode=0o700, exist_ok=True)
            taken._in_vain = False
            undo.pop_all()
        return taken

    @classmethod
    def take_default(cls, environ: Mapping[str, str]) -> RunDir:
        """Take the first of `default_paths` that can be used. Raises StartError.

        If another instance of this machine holds a directory, the search ends with that error.
        """
        refusals: list[StartError] = []
        for path in default_paths(environ):
            try:
                taken = cls.claim(path)
            except StartError as error:
                if isinstance(error, InUse) and not _is_of_another_machine(path):
                    raise
                refusals.append(error)
                continue
            taken.instead_of = refusals[0].message if refusals else ""
            return taken
        raise refusals[0]

    def restore(self) -> bool:
        """Create again what somebody has removed; return whether anything was missing.

        Raises OSError if it cannot be created, and StartError if another instance has taken it.
        """
        if is_still_there(self._lock_fd, self.path / "lock") and self.logs.is_dir():
            return False
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(self.path)
        if not is_still_there(self._lock_fd, self.path / "lock"):
            fd = _lock(self.path)
            os.close(self._lock_fd)
            self._lock_fd = fd
            self._sign()
        self.logs.mkdir(mode=0o700, exist_ok=True)
        if self._record is not None:
            self.record(self._record)
        return True

    def new_socket(self) -> Path:
        """Return a socket path that no earlier incarnation has used."""
        self._sockets += 1
        return self.path / f"w{self._sockets}.sock"

    def remove_socket(self, socket: Path) -> None:
        """Remove the socket of a worker that has ended, and the files that it had beside it."""
        for path in self.path.glob(f"{socket.name}*"):
            _remove(path)

    def log_path(self, name: str) -> Path:
        # No model's name contains "~", so no two children share a file.
        return self.logs / f"{name.replace('/', '~')}.log"

    def record(self, record: Record) -> None:
        """Record the supervisor that runs here. Raises StartError when the disk refuses."""
        self._in_vain = self._record is None
        with _explain_disk_errors(self.path):
            _write(self.path / "supervisor.json", json.dumps(asdict(record)))
        self._record, self._in_vain = record, False

    def record_profile(self, asked: str, profile: str) -> None:
        """Record the profile in force, for a start after a crash. Raises OSError."""
        _write(self.path / PROFILE, json.dumps([asked, profile]))

    def record_children(self, children: Iterable[Started]) -> None:
        """Record the processes that run here. Raises OSError."""
        _write(self.path / CHILDREN, json.dumps([asdict(child) for child in children]))

    def unlock(self) -> None:
        """Unlock the directory; keep the lock file, the logs and the events.

        A start that failed removes the directory too, if it created it.
        """
        self._clear()
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            self.logs.rmdir()
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock_fd, 0)
            if self._in_vain and self._made:
                (self.path / "lock").unlink()
                _remove_empty(self._made)
        os.close(self._lock_fd)

    def _sign(self) -> None:
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _sweep(self) -> None:
        """End the processes that a dead instance left, then remove their shared memory."""
        record = read_record(self.path)
        if record is not None and record.boot not in ("", boot_id()):
            return  # another boot: none of its processes runs on this machine
        children = read_children(self.path)
        end_leftovers(children, record.mark if record else "")
        shared_memory.sweep_segments(self.path, {child.pid for child in children})

    def _clear(self) -> None:
        own = "supervisor.json", PROFILE, CHILDREN, shared_memory.SEGMENTS
        for pattern in ("*.sock*", "*.new", *own):
            for path in self.path.glob(pattern):
                _remove(path)


def _check_path(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:  # no message could carry the paths of its sockets
        raise StartError(f"the run directory {str(path)!a} is not UTF-8; choose another") from None
    longest = len(os.fsencode(path / _LONGEST_NAME))
    if longest > _MAX_SOCKET_PATH_BYTES:
        raise StartError(
            f"the run directory {path} makes socket paths of {longest} bytes, and Unix sockets "
            f"allow {_MAX_SOCKET_PATH_BYTES}; choose a shorter one with --run-dir"
        )


def _check_sockets(path: Path) -> None:
    """Bind a probe socket. Raises OSError on a file system without sockets."""
    probe = path / "probe.sock"
    probe.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(probe))
    probe.unlink()


def boot_id() -> str:
    """Return the ID of this boot of this machine; "" if the kernel does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _is_of_another_machine(path: Path) -> bool:
    record = read_record(path)
    return record is not None and record.boot not in ("", boot_id())


def _make_private(path: Path) -> None:
    for parent in reversed((path, *path.parents)):
        if not parent.exists():
            with contextlib.suppress(FileExistsError):
                parent.mkdir(mode=0o700)
            _check_ours(parent)
    _check_ours(path)
    check_default_base(path)
    if not (path / "lock").exists() and any(path.iterdir()):
        raise StartError(f"the run directory {path} holds other files; choose an empty one")
    path.chmod(0o700)


def check_default_base(path: Path) -> None:
    """Raise StartError if another user owns the folder in /tmp that `path` is in.

    That user may have created it first, to swap what is below it.
    """
    if _fallback_base() in path.parents:
        _check_ours(_fallback_base())


def _check_ours(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(f"the run directory {path} is not a directory, or is a symbolic link")
    if found.st_uid != os.getuid():
        raise StartError(f"the run directory {path} belongs to another user (uid {found.st_uid})")


def _lock(path: Path) -> int:
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        who = f"pid {holder}" if holder else "another process"
        raise InUse(
            f"the run directory {path} is in use by {who}; stop it with "
            f"`servekit down --run-dir {path}`, or choose another with --run-dir"
        ) from None
    if not is_still_there(fd, path / "lock"):
        os.close(fd)
        return _lock(path)
    return fd


def is_still_there(fd: int, path: Path) -> bool:
    """Return whether `path` is still the file that was opened.

    A start that failed removes its lock file as it unlocks it.
    """
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove the empty folders among these, which are given innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the disk into a StartError."""
    try:
        yield
    except OSError as error:
        room = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space there, or choose" if room else "choose"
        raise StartError(
            f"cannot use the run directory {path}: {error.strerror}; {advice} another with "
            "--run-dir"
        ) from error


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new, never a part of it."""
    fresh = path.with_suffix(".new")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
