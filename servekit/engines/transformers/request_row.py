"""A request in flight inside the engine: a row of the batch."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.engines.api.base import StepOutput
from servekit.engines.api.job_state import Underway
from servekit.engines.transformers.lora.adapter import Adapter
from servekit.engines.transformers.token_history import TokenHistory
from servekit.engines.transformers.vision.image_reader import PromptImages


@dataclass(slots=True, eq=False)
class Row(Underway):
    """A request in flight, with its tensors on the device."""

    adapter: Adapter | None = None  # None: the base model
    images: PromptImages | None = None  # of a prompt in the batch, once they are read
    noted: list[Tensor] | None = None  # collects its logits, float32 [vocabulary], if set
    private: threading.Event | None = None  # marks an internal row; set at its end
    alone: int = 0  # if not 0, no other row shares its steps; unique among rows
    epoch: int = 0  # the prefix cache is shared within one epoch; see `scheduler`
    _bias: tuple[Tensor, Tensor] | None = None
    history: TokenHistory | None = None  # if it has penalties

    @property
    def context(self) -> list[int]:
        """Return the tokens that the model must have read before the next one.

        Virtual tokens are zeros here; `BatchedLora` puts their embeddings in place.
        """
        return [0] * self.virtual_tokens + self.job.prompt_ids + self.completion

    @property
    def virtual_tokens(self) -> int:
        return 0 if self.adapter is None else self.adapter.virtual_tokens

    @property
    def shift(self) -> int:
        """Return the distance of a generated token's position from its place."""
        return 0 if self.images is None else self.images.shift

    @property
    def group(self) -> int:
        """Return the group of rows that may share a step with this one."""
        if self.alone:
            return -self.alone
        return 0 if self.adapter is None else self.adapter.group

    @property
    def adapter_uid(self) -> int:
        """Return the adapter's unique id, or 0 for the base model."""
        return 0 if self.adapter is None else self.adapter.uid

    @property
    def plain(self) -> bool:
        """Return whether the token is simply the argmax of the unchanged logits."""
        watched = self.wants_logprobs or self.noted is not None
        return self.sampling.greedy and not (self.steered or watched or self.constraint)

    @property
    def ends_itself(self) -> bool:
        """Return whether its grammar or NaN logits have ended it, which the library cannot know."""
        return self.broken or (
            self.constraint is not None
            and (self.constraint.is_complete or bool(self.constraint.failure))
        )

    def run_alone(self, number: int, output: StepOutput) -> None:
        """Discard all results since its last token and run it in steps of its own.

        `output`, the result of the discarded step, must not be emitted.
        """
        self.alone, self.broken, self.scores = number, False, None
        if output.prompt or self.prompt_scores:
            self.score_prompt()
        if self.noted:
            self.noted.pop()

    def bias(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return token ids and the values added to their logits, both [entries]."""
        if self._bias is None:
            ids, values = zip(*self.sampling.logit_bias, strict=True)
            self._bias = (
                torch.tensor(ids, device=device),
                torch.tensor(values, dtype=torch.float32, device=device),
            )
        return self._bias
