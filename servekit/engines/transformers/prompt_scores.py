"""Log probabilities of prompt tokens, for `echo` with `logprobs` and for `prompt_logprobs`.

Batches compute logits only for the last token of each request. For a request that needs those of
its prompt, the hidden states of the step are kept and the model's own head (including its scaling
and soft-capping) runs on a few of them at a time: the whole [tokens, vocabulary] tensor never
exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from servekit.engines.transformers.request_row import Row

#: Maximum bytes of float32 logits computed at once; their logarithms take the same again.
PIECE_BYTES = 16 * 2**20


def base_of(model: Any) -> nn.Module | None:
    """Return the part of a causal model that computes hidden states; None if it has none."""
    base = getattr(model, model.base_model_prefix, None)
    return base if isinstance(base, nn.Module) and base is not model else None


class Hidden:
    """The hidden states of one forward pass, and the logits that the model computes from them."""

    def __init__(self, model: Any) -> None:
        """Wrap a model, or the model inside a PEFT model. Raises TypeError if `base_of` is None."""
        self._model = getattr(model, "get_base_model", lambda: model)()
        base = base_of(self._model)
        if base is None:
            raise TypeError(f"{type(self._model).__name__} has no part that makes hidden states")
        self._base = base
        self._output: Any = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the hidden states of the forward pass that runs in the block."""

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._output = output

        hook = self._base.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def logits(self, start: int, stop: int) -> Tensor:
        """Return float32 logits [tokens, vocabulary] of the packed batch from `start` to `stop`.

        The model's forward runs with these hidden states in place of its base.
        """
        states = self._output.last_hidden_state[:, start:stop]
        piece = dataclasses.replace(self._output, last_hidden_state=states)
        ids = torch.zeros(1, stop - start, dtype=torch.int64, device=states.device)
        before = self._base.__dict__.get("forward")
        self._base.forward = lambda *args, **kwargs: piece
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            if before is None:
                del self._base.forward
            else:
                self._base.forward = before
        return logits


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A run of prompt tokens in a batch: `count` tokens from place `at`.

    The token after the first of them is token `target` of the prompt.
    """

    row: Row
    at: int
    count: int
    target: int


def find_span(row: Row, at: int, past: int, count: int) -> Span | None:
    """Return the span to score of `count` tokens at place `at`, with `past` tokens read before."""
    if not row.unscored:
        return None
    known = row.virtual_tokens + len(row.prompt_scores) - 1  # last place scored so far
    first = max(past, known)
    last = min(past + count, row.virtual_tokens + len(row.job.prompt_ids) - 1)
    if first >= last:
        return None
    return Span(row, at + first - past, last - first, first - row.virtual_tokens + 1)


def score_spans(hidden: Hidden, spans: list[Span], vocab_size: int) -> None:
    """Give each row the log probabilities of its span."""
    step = max(1, PIECE_BYTES // (4 * vocab_size))
    for one in spans:
        for done in range(0, one.count, step):
            count = min(step, one.count - done)
            start = one.at + done
            _score_row(one.row, hidden.logits(start, start + count), one.target + done)


def _score_row(row: Row, logits: Tensor, target: int) -> None:
    """Score the prompt's tokens from `target` on; `logits` [tokens, vocabulary] precede them."""
    logs = logits.log_softmax(-1)
    ids = row.job.prompt_ids[target : target + len(logs)]
    chosen = torch.tensor(ids, device=logs.device).unsqueeze(1)
    beyond = chosen >= logs.shape[1]  # an embedding may have more rows than its head
    of_chosen = logs.gather(1, chosen.masked_fill(beyond, 0)).masked_fill(beyond, -torch.inf)
    ranks = (logs > of_chosen).sum(-1, keepdim=True) + 1
    width = min(row.job.params.prompt_logprobs or 0, logs.shape[1])
    values, best = logs.topk(width, dim=-1)
    parts = [of_chosen.double(), ranks.double(), values.double(), best.double()]
    for token, numbers in zip(ids, torch.cat(parts, dim=1).tolist(), strict=True):
        pairs = zip(numbers[2 + width :], numbers[2 : 2 + width], strict=True)
        row.note_prompt(token, numbers[0], int(numbers[1]), [(int(i), v) for i, v in pairs])
