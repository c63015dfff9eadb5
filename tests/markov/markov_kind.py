"""What servekit's supervisor has to know of the engine. Imports nothing that is large."""

from typing import Annotated

from pydantic import Field

from servekit.plugin import EngineKind, Section


class MarkovOptions(Section):
    """Options of `engine: markov`."""

    order: Annotated[int, Field(ge=1, le=16)] = 4
    """Bytes that the next one is guessed from."""
    slots: Annotated[int, Field(ge=1)] = 8
    """Requests it runs at once."""


KIND = EngineKind(MarkovOptions, formats=frozenset({"folder"}), gpu="never")
