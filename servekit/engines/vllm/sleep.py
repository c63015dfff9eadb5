"""Sleep and wake-up of the core.

On wake-up vLLM allocates the memory piece by piece and stops at a piece that does not fit: the
earlier pieces stay allocated, vLLM still considers itself asleep, and every further attempt fails
at the first piece. So the free memory of every GPU is checked first. A failure after that leaves a
core that neither sleeps nor serves and must be restarted.
"""

from __future__ import annotations

from collections.abc import Callable

from servekit.engines.vllm.core.causes import first_line
from servekit.engines.vllm.core.core_client import Core
from servekit.errors import LoadError
from servekit.units import format_bytes


class Broken(LoadError):
    """The core is half awake and must be restarted."""

    def __init__(self, what: str, error: Exception) -> None:
        super().__init__(
            f"vLLM could not {what}, and is being restarted: {first_line(error)}", permanent=False
        )


class SleepControl:
    """The sleep state of a core. vLLM's `level` 1 keeps weights in host memory, 2 reloads them.

    `restore` loads adapters again, which are lost at level 2.
    """

    def __init__(self, core: Core, level: int, restore: Callable[[], None]) -> None:
        self._core = core
        self._level = level
        self._restore = restore

    def sleep(self) -> None:
        """Put the core to sleep. Raises Broken, as some of the memory may have been freed."""
        try:
            self._core.call("sleep", self._level)
        except Exception as error:  # vLLM reports every error of the core as this type
            raise Broken("go to sleep", error) from error

    def wake(self) -> None:
        """Wake the core.

        Raises LoadError if memory is lacking; it stays asleep. Broken if it fails later.
        """
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
                f"The GPU has {format_bytes(lacking)} too little free memory to wake it.",
                permanent=False,
            )
