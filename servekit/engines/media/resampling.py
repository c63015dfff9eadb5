"""Resampling of a stream of samples, by a low-pass filter (a sinc, with a Hann window)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

#: Zero crossings of the sinc on each side, and the pass band as a share of the lower rate's half.
_CROSSINGS = 16
_ROLLOFF = 0.97
#: Rates are rounded to multiples of this, so that filters stay small: 44,101 Hz is read as 44,100.
_GRAIN, _COARSE_GRAIN = 25, 100
_FAST = 100_000  # Hz; higher rates are rounded to coarse multiples


class Resampler:
    """A converter from one rate to another, fed block by block.

    The new samples of one period (`_new` for each `_old`) are inner products of the samples around
    it with the rows of a matrix.
    """

    def __init__(self, old_rate: int, new_rate: int) -> None:
        grain = _GRAIN if old_rate < _FAST else _COARSE_GRAIN
        rounded = max(grain, round(old_rate / grain) * grain)
        shared = math.gcd(rounded, new_rate)
        self._old, self._new = rounded // shared, new_rate // shared
        self._read = self._written = 0
        if self._old == self._new:
            self._filter = None
            return
        cutoff = min(1.0, self._new / self._old) * _ROLLOFF  # of the old rate's Nyquist frequency
        self._margin = math.ceil(_CROSSINGS / cutoff)
        at = np.arange(-self._margin, self._old + self._margin)  # old samples around a period
        times = np.arange(self._new)[:, None] * self._old / self._new - at[None, :]
        window = np.cos(np.clip(times * cutoff / _CROSSINGS, -1, 1) * np.pi / 2) ** 2
        self._filter = (cutoff * np.sinc(times * cutoff) * window).astype(np.float32)
        self._kept = np.zeros(self._margin, np.float32)

    def take_samples(self, samples: Samples) -> Samples:
        """Return the new samples that are certain by now."""
        if self._filter is None:
            return samples
        self._read += len(samples)
        made = self._convert(samples)
        self._written += len(made)
        return made

    def end(self) -> Samples:
        """Return the rest of the new samples."""
        if self._filter is None:
            return np.zeros(0, np.float32)
        made = self._convert(np.zeros(self._old + 2 * self._margin, np.float32))
        return made[: -(-self._read * self._new // self._old) - self._written]

    def _convert(self, samples: Samples) -> Samples:
        assert self._filter is not None
        kept = np.concatenate([self._kept, samples])
        width = self._old + 2 * self._margin
        periods = max(0, (len(kept) - 2 * self._margin) // self._old)
        self._kept = kept[periods * self._old :]
        if not periods:
            return np.zeros(0, np.float32)
        around = np.lib.stride_tricks.sliding_window_view(kept, width)[:: self._old][:periods]
        made: Samples = (around @ self._filter.T).ravel()
        return made
