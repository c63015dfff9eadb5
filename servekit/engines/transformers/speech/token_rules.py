"""What a Whisper model may write next: the library's rules, for all windows of a batch at once.

Source: WhisperTimeStampLogitsProcessor, SuppressTokensLogitsProcessor and
SuppressTokensAtBeginLogitsProcessor of transformers. These read each window's tokens in Python for
each token; here a window has four numbers, and the rest is done on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Keys of a generation config that are heeded here, or by the library between windows.
_HEEDED = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("prev_sot_token_id", "no_timestamps_token_id", "max_initial_timestamp_index"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "alignment_heads"),
    *("is_multilingual", "lang_to_id", "task_to_id", "language", "task", "return_timestamps"),
    *("max_length", "max_new_tokens", "do_sample", "temperature", "top_k"),
    *("transformers_version", "_from_model_config"),
}
#: Values of other keys that change nothing.
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "min_length": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}


def find_other_settings(config: Any) -> list[str]:
    """Return the keys of a model's generation config that a batch would not heed."""
    stated = {key: value for key, value in config.to_diff_dict().items() if key not in _HEEDED}
    return [key for key, value in stated.items() if value not in (None, _NEUTRAL.get(key, False))]


class Bounds(NamedTuple):
    """The ids that the next token of a window may have."""

    table: int  # row of the table of suppressed ids
    text_from: int  # first text
    time_from: int  # first timestamp
    end: int  # after the last id


class TokenRules:
    """The rules of one model."""

    def __init__(self, config: Any, size: int, device: torch.device) -> None:
        """Take a generation config for a vocabulary of `size` ids."""
        unmarked = getattr(config, "no_timestamps_token_id", None)
        initial = getattr(config, "max_initial_timestamp_index", None)
        ends = config.eos_token_id
        self.ends: list[int] = ends if isinstance(ends, list) else [ends]
        self._size = size
        self._times = size if unmarked is None else unmarked + 1
        self._initial_end = size if initial is None else min(size, self._times + initial + 1)
        self._ids = torch.arange(size, device=device)
        #: Suppressed ids: always; of the first token; with timestamps; of the first of these.
        self._suppressed = torch.zeros(4, size, dtype=torch.bool, device=device)
        for rows, key in (
            (slice(None), "suppress_tokens"),
            (slice(1, None, 2), "begin_suppress_tokens"),
        ):
            stated = getattr(config, key, None) or ()
            self._suppressed[rows, [id for id in stated if 0 <= id < size]] = True
        if unmarked is not None:
            self._suppressed[2:, unmarked] = True

    def bound(self, written: list[int], timed: bool) -> Bounds:
        """Return the bounds of the token after those that are written."""
        first = not written
        if not timed:
            return Bounds(int(first), 0, self._times, self._size)
        if first:
            return Bounds(3, self._times, self._times, self._initial_end)
        after_time = written[-1] >= self._times
        after_two = after_time and (len(written) < 2 or written[-2] >= self._times)
        opens = after_time and not after_two  # a segment has ended: the next begins here or later
        time = next((token for token in reversed(written) if token >= self._times), None)
        time_from = self._times if time is None else time + (not opens)
        end = self._times if after_two else self._size
        return Bounds(2, self.ends[0] if opens else 0, time_from, end)

    def apply(self, logits: Tensor, bounds: Tensor, timed: bool) -> Tensor:
        """Return scores, float32 [windows, vocabulary], with -inf for what is forbidden.

        `bounds` is [4, windows]; `timed` is False if no window has timestamps.
        """
        table, text_from, time_from, end = bounds.unsqueeze(-1)
        ids, times = self._ids, self._times
        forbidden = self._suppressed[table[:, 0]]
        if timed:
            between = (ids >= times) & (ids < time_from)
            forbidden = forbidden | (ids < text_from) | between | (ids >= end)
        scores = logits.float().masked_fill(forbidden, -torch.inf)
        if timed and times < self._size:
            # A timestamp, if all of them together are likelier than the likeliest text.
            logprobs = scores.log_softmax(-1)
            time = logprobs[:, times:].logsumexp(-1, keepdim=True)
            text = logprobs[:, :times].amax(-1, keepdim=True)
            scores[:, :times].masked_fill_((table >= 2) & (time > text), -torch.inf)
        return scores
