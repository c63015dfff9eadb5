"""One request under way inside an engine: a row of the batch."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.engines.api.base import StepOutput
from servekit.engines.api.job_state import Underway
from servekit.engines.transformers.lora.adapter import Adapter


@dataclass(slots=True, eq=False)
class Row(Underway):
    """A request under way, and what it keeps on the device."""

    adapter: Adapter | None = None  # None: the base model
    cached_tokens: int | None = None  # of the prompt, once it was looked for in the cache
    noted: list[Tensor] | None = None  # where to keep its logits, float32 [vocabulary], if anywhere
    private: threading.Event | None = None  # the engine's own: emitted to no one, set at its end
    alone: int = 0  # not 0: it shares no step with others; no two rows have the same number
    epoch: int = 0  # blocks of the prefix cache are shared with rows of the same one; see `groups`
    _bias: tuple[Tensor, Tensor] | None = None
    _counted: int = 0
    _counts: Tensor | None = None
    _seen: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far, an adapter's virtual ones included."""
        return self.virtual_tokens + len(self.job.prompt_ids) + len(self.completion)

    @property
    def context(self) -> list[int]:
        """What the model has to have read before the next token.

        Virtual tokens are zeros here: what they embed to is put in their place (`Mixing`).
        """
        return [0] * self.virtual_tokens + self.job.prompt_ids + self.completion

    @property
    def virtual_tokens(self) -> int:
        return 0 if self.adapter is None else self.adapter.virtual_tokens

    def note_cached(self, tokens: int) -> None:
        """So many tokens of its context were in the cache; only the first time tells of the prompt.

        Later ones are of a row that had to make room, and finds what it had computed itself.
        """
        if self.cached_tokens is None:
            own = max(0, tokens - self.virtual_tokens)
            self.cached_tokens = min(own, len(self.job.prompt_ids))

    @property
    def group(self) -> int:
        """Rows of one group may share a step."""
        if self.alone:
            return -self.alone
        return 0 if self.adapter is None else self.adapter.group

    @property
    def adapter_uid(self) -> int:
        """0 is the base model."""
        return 0 if self.adapter is None else self.adapter.uid

    @property
    def plain(self) -> bool:
        """Greedy and nothing else: the argmax of the logits as they are is its token."""
        watched = self.wants_logprobs or self.noted is not None
        return self.sampling.greedy and not (self.steered or watched or self.constraint)

    @property
    def ends_itself(self) -> bool:
        """Ended by its grammar, or by logits that are NaN, of which the library knows nothing."""
        return self.broken or (
            self.constraint is not None and (self.constraint.ended or bool(self.constraint.failure))
        )

    def run_alone(self, number: int, output: StepOutput) -> None:
        """Forget what was computed for it since its last token; `output` is not to be told."""
        self.alone, self.broken, self.scores = number, False, None
        if output.prompt or self.prompt_scores:
            self.score_prompt()
        if self.noted:
            self.noted.pop()

    def bias(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token ids and what is added to their logits, both [entries]."""
        if self._bias is None:
            ids, values = zip(*self.sampling.logit_bias, strict=True)
            self._bias = (
                torch.tensor(ids, device=device),
                torch.tensor(values, dtype=torch.float32, device=device),
            )
        return self._bias

    def history(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Times each token is in the completion, and whether it is anywhere in the context.

        Two tensors [vocabulary], float32 and bool, kept and brought up to date here. Tokens of the
        prompt that are beyond them are read only, and are left out.
        """
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(vocab_size, device=device)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            read = [token for token in self.job.prompt_ids if token < vocab_size]
            self._seen[torch.tensor(read, dtype=torch.int64, device=device)] = True
        new = self.completion[self._counted :]
        if new:
            ids = torch.tensor(new, device=device)
            self._counts.index_add_(0, ids, torch.ones(len(new), device=device))
            self._seen[ids] = True
            self._counted = len(self.completion)
        return self._counts, self._seen
