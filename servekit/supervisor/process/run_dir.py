"""The run directory: one instance's lock, sockets, logs and the record of what it started.

    lock               flock, held while the instance lives; its text is the holder's PID
    supervisor.json    who runs here: pid, start time, URL, configuration, mark
    children.json      what it started: name, pid, birthmark
    shared_memory.json what its children have in /dev/shm
    control.sock       the operator's socket
    w1.sock …          one socket per worker incarnation
    logs/NAME.log      what each child wrote: gateway-0.log, MODEL~0.log of the worker MODEL/0
    events.db          what has happened, in earlier lives too (`supervisor.journal`)

It belongs to this user alone (0700). What a dead instance left is swept by the next one. Without
room for its records there is no instance: nobody could stop it or ask it anything.

The default is under XDG_STATE_HOME, which survives the logout of the user and a restart of the
machine, as logs and events are to. Where that cannot be written, a directory in XDG_RUNTIME_DIR or
/tmp stands for it. Whatever somebody removes while the instance lives is made anew (`restore`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
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


@dataclass(frozen=True, slots=True)
class Record:
    """Who runs in a run directory."""

    pid: int
    started_at: float  # Unix time, s
    url: str
    config: str
    mark: str
    boot: str = ""  # the machine's boot ID: PIDs and birthmarks say nothing after another boot


class InUse(StartError):
    """Another instance holds the run directory."""


def default_paths(environ: Mapping[str, str]) -> list[Path]:
    """Where an instance lives when nobody says otherwise: the first that can be used.

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
    """Source: XDG base directory specification. `sudo` may leave another user's HOME to us."""
    if (given := Path(environ.get("XDG_STATE_HOME", ""))).is_absolute():
        return given
    home = Path(environ.get("HOME", ""))
    if not home.is_absolute() or not _may_be_ours(home):
        with contextlib.suppress(KeyError):  # a container's user may be unknown there
            home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    return home / ".local" / "state" if home.is_absolute() else _fallback_base()


def nobody(path: Path) -> NobodyRuns:
    """What every command says where it needs an instance, and none runs in `path`."""
    return NobodyRuns(
        f"no servekit runs in {path}; `servekit up` starts one, --run-dir names another"
    )


def _fallback_base() -> Path:
    return Path(f"/tmp/servekit-{os.getuid()}")


def read_record(path: Path) -> Record | None:
    """Who runs, or last ran, in `path`."""
    try:
        return Record(**json.loads((path / "supervisor.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


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
        self._made = made  # folders that were not there before
        self._in_vain = True
        self._record: Record | None = None
        self._sockets = 0
        self.instead_of = ""  # why the first default could not be used
        self.control = path / "control.sock"
        self.logs = path / "logs"

    @classmethod
    def take(cls, path: Path, *, sweep: bool = True) -> RunDir:
        """Make it ours and clear what a dead instance left. Raises StartError.

        Without `sweep` what it has left running runs on.
        """
        path = Path(os.path.abspath(path))  # noqa: PTH100  (resolve() would follow a symlink)
        _check_length(path)
        with contextlib.ExitStack() as undo, _told(path):
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            undo.callback(_remove_empty, made)
            _make_private(path)
            taken = cls(path, _lock(path), made)
            undo.callback(taken.release)
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

        One that another instance of this machine holds is no reason to look further.
        """
        refusals: list[StartError] = []
        for path in default_paths(environ):
            try:
                taken = cls.take(path)
            except StartError as error:
                if isinstance(error, InUse) and not _is_of_another_machine(path):
                    raise
                refusals.append(error)
                continue
            taken.instead_of = refusals[0].message if refusals else ""
            return taken
        raise refusals[0]

    def restore(self) -> bool:
        """Make anew what somebody has removed; whether anything was missing.

        Raises OSError where it cannot be made, and StartError where it is another's by now.
        """
        if _is_still_there(self._lock_fd, self.path / "lock") and self.logs.is_dir():
            return False
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(self.path)
        if not _is_still_there(self._lock_fd, self.path / "lock"):
            fd = _lock(self.path)
            os.close(self._lock_fd)
            self._lock_fd = fd
            self._sign()
        self.logs.mkdir(mode=0o700, exist_ok=True)
        if self._record is not None:
            self.record(self._record)
        return True

    def new_socket(self) -> Path:
        """A socket path that no incarnation before has used."""
        self._sockets += 1
        return self.path / f"w{self._sockets}.sock"

    def log_path(self, name: str) -> Path:
        # "~" occurs in no model's name, so no two children share a file.
        return self.logs / f"{name.replace('/', '~')}.log"

    def record(self, record: Record) -> None:
        """Say who runs here. Raises StartError when the disk is full or refuses."""
        self._in_vain = self._record is None
        with _told(self.path):
            _write(self.path / "supervisor.json", json.dumps(asdict(record)))
        self._record, self._in_vain = record, False

    def record_children(self, children: Iterable[Started]) -> None:
        """Say what runs here. Raises OSError."""
        _write(self.path / CHILDREN, json.dumps([asdict(child) for child in children]))

    def release(self) -> None:
        """Leave the lock file, the logs and the events; nothing that a start in vain has made."""
        self._clear()
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
        """End what a dead instance left running, then remove its files."""
        record = read_record(self.path)
        if record is not None and record.boot not in ("", boot_id()):
            return  # nothing of it runs on this machine, or any more
        children = read_children(self.path)
        end_leftovers(children, record.mark if record else "")
        unnoted = shared_memory.named_after({child.pid for child in children})
        shared_memory.remove(shared_memory.read(self.path) | unnoted)

    def _clear(self) -> None:
        for pattern in ("*.sock", "*.new", "supervisor.json", CHILDREN, shared_memory.SEGMENTS):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)


def _check_length(path: Path) -> None:
    longest = len(os.fsencode(path / _LONGEST_NAME))
    if longest > _MAX_SOCKET_PATH_BYTES:
        raise StartError(
            f"the run directory {path} makes socket paths of {longest} bytes, and Unix sockets "
            f"allow {_MAX_SOCKET_PATH_BYTES}; choose a shorter one with --run-dir"
        )


def _check_sockets(path: Path) -> None:
    """Raises OSError on a file system without sockets."""
    probe = path / "probe.sock"
    probe.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(probe))
    probe.unlink()


def boot_id() -> str:
    """What tells this boot of this machine from all others; "" where the kernel does not say."""
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
    _check_default_base(path)
    if not (path / "lock").exists() and any(path.iterdir()):
        raise StartError(f"the run directory {path} holds other files; choose an empty one")
    path.chmod(0o700)


def _check_default_base(path: Path) -> None:
    # Under /tmp, another user may have made our parent first, to swap what is below it.
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
    if not _is_still_there(fd, path / "lock"):
        os.close(fd)
        return _lock(path)
    return fd


def _is_still_there(fd: int, path: Path) -> bool:
    """Whether `path` is what was opened: a start in vain removes its lock as it gives it up."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _remove_empty(folders: Iterable[Path]) -> None:
    """The innermost first; what holds something stays."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into StartError."""
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
    """Replace a file in one step: a reader sees the old text or the new, never half of it."""
    fresh = path.with_suffix(".new")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
