"""Options and facts of the fragile engine, for servekit's supervisor."""

from typing import Annotated

from pydantic import Field

from servekit.plugin import EngineKind, Section


class FragileOptions(Section):
    """Options of `engine: fragile`."""

    step_s: Annotated[float, Field(ge=0)] = 0.01
    """Time of one step, in seconds."""
    slots: Annotated[int, Field(ge=1)] = 64
    """Requests that run at once."""
    raise_on: str = "boom"
    """The step raises while a prompt that contains this text runs."""
    raise_after: Annotated[int, Field(ge=0)] = 1
    """Tokens that such a prompt brings before its step raises."""
    core: bool = False
    """Take every step in a process below the worker, as vLLM's engine core does."""


KIND = EngineKind(FragileOptions, formats=frozenset({"folder"}), gpu="never")
