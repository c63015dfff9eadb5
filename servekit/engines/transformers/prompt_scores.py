"""Log probabilities of the tokens of a prompt, for `echo` with `logprobs` and `prompt_logprobs`.

Batches bring logits of the last token of each request only. For a request that wants them of its
prompt, the hidden states of the step are kept, and the model's own head (with its scaling, its
soft-capping and all) is run on a few of them at a time: [tokens, vocabulary] is never made whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from servekit.engines.transformers.request_row import Row

#: Logits that are made at once, in bytes of float32; their logarithms take as much again.
PIECE_BYTES = 16 * 2**20


def base_of(model: Any) -> nn.Module | None:
    """The part of a causal model that makes hidden states; None where it has no such part."""
    base = getattr(model, model.base_model_prefix, None)
    return base if isinstance(base, nn.Module) and base is not model else None


class Hidden:
    """The hidden states of one forward pass, and the logits that the model makes of them."""

    def __init__(self, model: Any) -> None:
        """Of a PEFT model those of the model inside. Raises TypeError where `base_of` is None."""
        self._model = getattr(model, "get_base_model", lambda: model)()
        base = base_of(self._model)
        if base is None:
            raise TypeError(f"{type(self._model).__name__} has no part that makes hidden states")
        self._base = base
        self._output: Any = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep those of the pass that the block makes."""

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._output = output

        hook = self._base.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def logits(self, start: int, stop: int) -> Tensor:
        """Of the tokens from `start` to `stop` of the packed batch: float32 [tokens, vocabulary].

        The model's forward is run with these hidden states in its base's place.
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
    """Where tokens of a prompt are read in a batch: `count` of them from place `at` on.

    After the first of them comes token `target` of the prompt.
    """

    row: Row
    at: int
    count: int
    target: int


def span(row: Row, at: int, past: int, count: int) -> Span | None:
    """What is to be scored of `count` tokens at place `at`, with `past` tokens read before them."""
    if not row.unscored:
        return None
    known = row.virtual_tokens + len(row.prompt_scores) - 1  # the last place that is scored by now
    first = max(past, known)
    last = min(past + count, row.virtual_tokens + len(row.job.prompt_ids) - 1)
    if first >= last:
        return None
    return Span(row, at + first - past, last - first, first - row.virtual_tokens + 1)


def score(hidden: Hidden, spans: list[Span], vocab_size: int) -> None:
    """Give each row the log probabilities of its span."""
    step = max(1, PIECE_BYTES // (4 * vocab_size))
    for one in spans:
        for done in range(0, one.count, step):
            count = min(step, one.count - done)
            start = one.at + done
            _score(one.row, hidden.logits(start, start + count), one.target + done)


def _score(row: Row, logits: Tensor, target: int) -> None:
    """`logits` [tokens, vocabulary] are those before the prompt's tokens from `target` on."""
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
