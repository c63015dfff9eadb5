"""The server: a child of the worker, in its process group, with its output.

The group is what the supervisor accounts GPU memory to, and what it kills when the worker ends,
however that happens; processes that left the group are found by a mark in their environment.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from servekit.errors import LoadError
from servekit.system.procfs import name_signal


class ServerProcess:
    """A server, from its start to its exit. `on_exit` is called from a thread of its own."""

    def __init__(
        self, words: Sequence[str], on_exit: Callable[[], None], more: Mapping[str, str]
    ) -> None:
        """Start the server, with `more` in its environment.

        Raises LoadError if there is no such program.
        """
        module = words[2] if len(words) > 2 and words[1] == "-m" else ""
        self.name = module or Path(words[0]).name
        self.exited = threading.Event()
        self._on_exit = on_exit
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, env={**os.environ, **more}
            )
        except OSError as error:
            raise LoadError(f"{words[0]} cannot be started: {error.strerror}") from None
        threading.Thread(target=self._watch, name="server", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cause(self) -> str:
        """Return the way in which the server ended, as a sentence."""
        code = self._process.returncode
        if code >= 0:
            return f"the server {self.name} exited with code {code}"
        return f"the server {self.name} was killed by {name_signal(-code)}"

    def stop(self, grace_s: float) -> None:
        """Ask the server to end, and insist after `grace_s`; return once it is reaped."""
        self._process.terminate()
        if not self.exited.wait(grace_s):
            self._process.kill()
            self.exited.wait()

    def _watch(self) -> None:
        self._process.wait()
        self.exited.set()
        self._on_exit()
