"""The windows of a recording, which faster-whisper's own loop asks for and a batch writes.

The library's loop over a recording calls its model to encode a window of 30 s and to write it, and
finds from what is written where the next window begins. `SteppedWhisper` is the library's class for
one recording: to write is to wait for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from faster_whisper import WhisperModel
from numpy.typing import NDArray

from servekit.errors import RequestError


@dataclass(eq=False)
class Window:
    """A window of a recording, and what the model is asked to write of it."""

    features: NDArray[np.float32]  # [mel bins, frames]
    prompt: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # of ctranslate2's `generate`
    language_at: int | None = None  # place in the prompt for the language, if it is to be found
    alone: bool = False  # samples, or times of words, which need what the encoder made
    encoded: Any = None  # of a window alone, on the device
    result: Any = None

    @property
    def kind(self) -> Hashable:
        """Return what the windows of one call have in common: the prompt's length, and settings."""
        return len(self.prompt), tuple(sorted(self.settings.items()))


class SteppedWhisper(WhisperModel):  # type: ignore[misc]
    """faster-whisper's class for one recording."""

    def __init__(self, whisper: WhisperModel, write: Callable[[Window], None]) -> None:
        """Share the model of `whisper`; `write` returns once a window is written."""
        self.__dict__.update(whisper.__dict__)
        self.model = _WindowModel(whisper.model, write)
        self._at = -1

    def encode(self, features: NDArray[np.float32]) -> Any:
        return Window(features)

    def _split_segments_by_timestamps(self, *args: Any, seek: int, **kwargs: Any) -> Any:
        """Cut a written window into segments; the library calls this once for each.

        Raises RequestError if the window is the last one again, as this would go on for ever.
        """
        if seek <= self._at:
            raise RequestError(
                f"file: the model does not come further than {seek / 100:.2f} s of this recording;"
                " another language, prompt or temperature may help",
                param="file",
            )
        self._at = seek
        return super()._split_segments_by_timestamps(*args, seek=seek, **kwargs)


class _WindowModel:
    """The part of ctranslate2's model that the library's loop uses."""

    def __init__(self, model: Any, write: Callable[[Window], None]) -> None:
        self._model = model
        self._write = write

    def generate(self, window: Window, prompts: list[list[int]], **settings: Any) -> list[Any]:
        [window.prompt], window.settings = prompts, settings
        self._write(window)
        return [window.result]

    def align(self, window: Window, *args: Any, **kwargs: Any) -> Any:
        return self._model.align(window.encoded, *args, **kwargs)
