"""Replacements for the library's choice of tokens and for its output queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.sampling.sampler import Sampler, best


class Discard(OutputRouter):
    """An output router that drops all outputs; tokens are read from the requests' states."""

    def deliver(self, output: Any) -> None:
        return None

    def deliver_batch(self, outputs: Any) -> None:
        return None


def choose(scores: Tensor, output_ids: Tensor) -> None:
    """Take the best tokens; replaces the library's `ModelRunner._sample`.

    `scores` is [1, requests, vocabulary] float32; ids are written to the start of `output_ids[0]`.
    """
    tokens = best(scores[0])
    output_ids[0, : len(tokens)].copy_(tokens)


class SamplingHook(ContinuousBatchingLogitsProcessorList):
    """A caller of our sampler, in place of the library's logits processors.

    The library itself takes the argmax. It does not call this object if `do_processing` is false,
    so a batch of plain greedy rows costs nothing.
    """

    def __init__(self) -> None:
        super().__init__(LogitsProcessorList())
        self.rows: dict[str, Row] = {}
        self._batch: list[Row] = []
        self._sampler = Sampler()

    def prepare_tensor_args(self, requests_in_batch: Sequence[Any], arg_storage: Any) -> Any:
        """Record the rows whose logits follow, in order."""
        self._batch = [
            self.rows[future.state.request_id]
            for future in requests_in_batch
            if future.has_new_token
        ]
        self.do_processing = not all(row.plain for row in self._batch)
        return arg_storage

    def forget(self) -> None:
        """Drop the last batch's rows, which hold references to their adapters."""
        self._batch = []

    def __call__(self, input_ids: Any, scores: Any, logits_processor_args: Any) -> Any:
        for row, logits in zip(self._batch, scores, strict=False):
            if row.noted is not None:
                row.noted.append(logits.clone())
        self._sampler.apply(self._batch, scores[: len(self._batch)])
        return scores
