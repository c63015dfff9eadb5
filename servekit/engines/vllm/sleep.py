"""The core asleep, and awake again.

vLLM takes the memory again piece by piece, and where a piece is not to be had it stops: the pieces
before are taken, its own notes say that it sleeps, and every further try fails at the first piece.
So it is asked first whether there is room, on every GPU. What fails after that leaves a core that
neither sleeps nor serves, for which there is no way back but a new one.
"""

from __future__ import annotations

from collections.abc import Callable

from servekit.engines.vllm.causes import first_line
from servekit.engines.vllm.core_client import Core
from servekit.errors import LoadError


class Broken(LoadError):
    """The core is half awake: it must be started anew."""

    def __init__(self, what: str, error: Exception) -> None:
        super().__init__(
            f"vLLM could not {what}, and is being restarted: {first_line(error)}", permanent=False
        )


class SleepControl:
    """`level` as vLLM counts: 1 keeps the weights in the host's memory, 2 reads them again.

    `restore` gives the core back what it was given since, which level 2 forgets.
    """

    def __init__(self, core: Core, level: int, restore: Callable[[], None]) -> None:
        self._core = core
        self._level = level
        self._restore = restore

    def sleep(self) -> None:
        """Raises Broken: some of the memory may have been given back."""
        try:
            self._core.call("sleep", self._level)
        except Exception as error:  # whatever the core has raised comes as this
            raise Broken("go to sleep", error) from error

    def wake(self) -> None:
        """Raises LoadError where there is no room; it sleeps on. Broken where it fails later."""
        self._find_room()
        try:
            if self._level == 1:
                self._core.call("wake_up", None)
            else:
                self._core.call("wake_up", ["weights"])
                self._core.call("collective_rpc", "reload_weights", None, (), None)
                self._core.call("wake_up", ["kv_cache"])
                self._restore()
        except Exception as error:  # as above
            raise Broken("wake up", error) from error

    def _find_room(self) -> None:
        try:
            lacking = max(self._core.call("collective_rpc", "lacking_bytes", None, (), None))
        except Exception as error:  # as above; nothing has changed
            raise LoadError(f"vLLM: {first_line(error)}", permanent=False) from error
        if lacking:
            raise LoadError(
                f"The GPU has {lacking / 2**30:.1f} GiB too little free memory to wake it.",
                permanent=False,
            )
