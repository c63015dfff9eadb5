"""An instance in the background: `servekit up -d` and `servekit run`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from servekit.errors import ServekitError, StartError
from servekit.system.python.python_command import module_command

if TYPE_CHECKING:
    from servekit.protocol.messages import Status
    from servekit.supervisor.process.instances import Running

_LOOK_EVERY_S = 0.1
_ANSWER_S = 10.0
#: Lines of the log that are shown of a start that failed.
_LAST_LINES = 20


class Background:
    """An instance that this process has started and that outlives it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, begin: int = 0) -> None:
        self.process = process
        self.log = log
        self._begin = begin  # of this instance's part of the log, which has those of before
        self._told: dict[str, str] = {}  # by replica: the progress that was shown last

    @classmethod
    def start(cls, config: Path, run_dir: Path | None, flags: Sequence[str] = ()) -> Background:
        """Start `servekit up` in a session of its own. Raises StartError if its log fails."""
        from servekit.supervisor.process.run_dir import default_paths

        folders = default_paths(os.environ) if run_dir is None else [run_dir]
        log, output = _open_first_log(folders)
        command = [*module_command("servekit"), "up", "--config", str(config)]
        command += ["--log-file", str(log), *flags]
        command += ["--run-dir", str(run_dir)] if run_dir is not None else []
        with output:
            begin = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
        return cls(process, log, begin)

    def until_started(self) -> Status:
        """Return the status once each replica serves or has failed.

        Raises StartError with the end of the log if the instance ends.
        """
        from servekit.cli.display.startup_display import is_start_over

        while True:
            if (code := self.process.poll()) is not None:
                raise StartError(f"{self._last_lines()}\nservekit has ended ({code}): {self.log}")
            status = self._read_status()
            if status is not None:
                self._tell_progress(status)
                if is_start_over(status):
                    return status
            time.sleep(_LOOK_EVERY_S)

    def stop_instance(self) -> None:
        """Stop the instance, and wait until it is gone. A second Ctrl-C does not wait."""
        try:
            self.process.terminate()
            self.process.wait()
        except KeyboardInterrupt:
            self.process.terminate()
            self.process.wait()

    def find_instance(self) -> Running | None:
        """Return the running instance, once it has its run directory."""
        from servekit.supervisor.process.instances import list_instances

        return next((one for one in list_instances() if one.record.pid == self.process.pid), None)

    def _read_status(self) -> Status | None:
        from servekit.cli.instance_lookup import read_status

        found = self.find_instance()
        if found is None:
            return None
        with contextlib.suppress(ServekitError):  # it does not listen yet, or no more
            return read_status(found.run_dir, _ANSWER_S)
        return None

    def _tell_progress(self, status: Status) -> None:
        for model in status.models:
            for replica in model.replicas:
                said = replica.progress.phase if replica.progress is not None else replica.state
                if self._told.get(replica.name) != said:
                    self._told[replica.name] = said
                    sys.stderr.write(f"{replica.name}: {said}\n")

    def _last_lines(self) -> str:
        try:
            text = self.log.read_bytes()[self._begin :].decode(errors="replace")
            return "\n".join(text.splitlines()[-_LAST_LINES:])
        except OSError:
            return ""


def _environment() -> dict[str, str]:
    """Return our environment without the options of `up`, which the command line states."""
    ours = (
        *("SERVEKIT_UP_", "SERVEKIT_PORT", "SERVEKIT_HOST"),
        *("SERVEKIT_LOG_FORMAT", "SERVEKIT_PROFILE"),
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _open_first_log(folders: Sequence[Path]) -> tuple[Path, IO[bytes]]:
    """Open the log beside the first of these run directories where that is possible.

    Raises the StartError of the first if none is.
    """
    refusals: list[StartError] = []
    for folder in folders:
        log = folder.with_name(f"{folder.name}.log").absolute()
        try:
            return log, _open_log(log)
        except StartError as error:
            refusals.append(error)
    raise refusals[0]


def _open_log(path: Path) -> IO[bytes]:
    """Open the log for what is not logged: Python's own last words. Raises StartError."""
    from servekit.supervisor.process.run_dir import check_default_base

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_default_base(path)
        path.touch(mode=0o600)
        return path.open("ab")
    except OSError as error:
        raise StartError(f"cannot write the log {path}: {error.strerror}") from None
