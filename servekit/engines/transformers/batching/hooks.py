"""What stands in the library's place: its choice of tokens, and its queue of outputs."""

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
    """The library queues finished outputs for someone to fetch; tokens are read elsewhere."""

    def deliver(self, output: Any) -> None:
        return None

    def deliver_batch(self, outputs: Any) -> None:
        return None


def choose(scores: Tensor, output_ids: Tensor) -> None:
    """Take the best tokens, in the place of the library's `ModelRunner._sample`.

    `scores` [1, requests, vocabulary] float32; ids are written to the start of `output_ids[0]`.
    """
    tokens = best(scores[0])
    output_ids[0, : len(tokens)].copy_(tokens)


class SamplingHook(ContinuousBatchingLogitsProcessorList):
    """Stands where the library keeps its logits processors, and calls our sampler.

    The library is told to take the argmax. With `do_processing` false it does not come here at
    all, which is why a batch of plain greedy rows costs nothing.
    """

    def __init__(self) -> None:
        super().__init__(LogitsProcessorList())
        self.rows: dict[str, Row] = {}
        self._batch: list[Row] = []
        self._sampler = Sampler()

    def prepare_tensor_args(self, requests_in_batch: Sequence[Any], arg_storage: Any) -> Any:
        """Note whose logits will come, in order."""
        self._batch = [
            self.rows[future.state.request_id]
            for future in requests_in_batch
            if future.has_new_token
        ]
        self.do_processing = not all(row.plain for row in self._batch)
        return arg_storage

    def forget(self) -> None:
        """Drop the last batch's rows, which hold their adapters."""
        self._batch = []

    def __call__(self, input_ids: Any, scores: Any, logits_processor_args: Any) -> Any:
        for row, logits in zip(self._batch, scores, strict=False):
            if row.noted is not None:
                row.noted.append(logits.clone())
        self._sampler.apply(self._batch, scores[: len(self._batch)])
        return scores
