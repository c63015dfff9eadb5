"""Runner of one request at a time, for models that cannot share a batch, such as recurrent ones.

It uses the model's own `forward` and cache through the same two methods as `generate`, so it
supports every model that `generate` does. A step is one token, or one chunk of the prompt if the
cache allows reading it in chunks; a request can be cancelled between any two steps.
"""

from __future__ import annotations

import contextlib
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from servekit.engines.api.base import StepOutput
from servekit.engines.transformers import prompt_scores
from servekit.engines.transformers.lora.batched_lora import BatchedLora, Part
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner import CausalRunner
from servekit.engines.transformers.sampling import Sampler, best_tokens

#: Names of the cache as an argument, from transformers 5.24 on and before.
_CACHES = ("cache", "past_key_values")
#: The library's method for positions, which some models have an own one of.
_POSITIONS = "_prepare_position_ids_for_generation"


class StaticRunner(CausalRunner):
    """Runner of one row while the others wait."""

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        chunk: int,
        mixing: BatchedLora | None = None,
    ) -> None:
        super().__init__(model, mixing)
        self._model: Any = model
        self._sampler = Sampler()
        self._chunk = chunk
        self._row: Row | None = None
        self._unread: list[int] = []
        self._seen = 0
        self._cache: dict[str, Any] = {}
        self.capacity = capacity

    @property
    def running(self) -> int:
        return int(self._row is not None)

    @property
    def kv_used(self) -> float:
        row = self._row
        return 0.0 if row is None else min(1.0, row.length / self.capacity)

    def cancel(self, row: Row) -> None:
        if self._row is row:
            self._drop_row()
        else:
            self._withdraw(row)

    @torch.no_grad()
    def step(self) -> list[tuple[Row, StepOutput]]:
        """Read a chunk of the prompt, or generate a token."""
        row = self._row or self._begin_row(self._waiting.popleft())
        logits = self._read_tokens(row)
        if self._unread:
            return []
        if row.noted is not None:
            row.noted.append(logits[0].clone())
        self._sampler.apply([row], logits)
        token = int(best_tokens(logits))
        output = row.push(token)
        if row.prompt_scores:
            row.tell_prompt(output)
        self._unread = [token]
        if output.finish or output.error:
            self._drop_row()
        return [(row, output)]

    def make_pages(self) -> None:
        """Do nothing: each request creates its own cache."""

    def drop_pages(self) -> None:
        """Free the cache of the last request."""
        self._drop_row()
        self.mixing.step = None

    def close(self) -> None:
        self._drop_row()
        self._waiting.clear()

    # ---- one row

    def _begin_row(self, row: Row) -> Row:
        self._row = row
        self._unread = row.context
        return row

    def _drop_row(self) -> None:
        self._row, self._unread, self._seen, self._cache = None, [], 0, {}

    def _read_tokens(self, row: Row) -> torch.Tensor:
        """Read the next tokens; return the logits after the last one, float32 [1, vocabulary]."""
        size = self._count_next(row)
        now, self._unread = self._unread[:size], self._unread[size:]
        model, first = self._model_of(row), self._seen == 0
        self.mixing.lay_out_alone(Part(row.adapter, self._seen, len(now)))
        wanted = prompt_scores.find_span(row, 0, self._seen, len(now))
        self._seen += len(now)
        if first:
            self._cache |= self._make_cache(model)
        inputs = model.prepare_inputs_for_generation(
            torch.tensor([now], device=model.device),
            attention_mask=torch.ones(1, self._seen, dtype=torch.int64, device=model.device),
            is_first_iteration=first,
            use_cache=True,
            **(self._positions(model) | self._cache),
        )
        hidden = None if wanted is None else prompt_scores.Hidden(model)
        with contextlib.nullcontext() if hidden is None else hidden.kept():
            outputs = model(**(inputs | self._last_logits(model)), return_dict=True)
        if hidden is not None and wanted is not None:
            prompt_scores.score_spans(hidden, [wanted], outputs.logits.shape[-1])
        self._cache = model._update_model_kwargs_for_generation(outputs, self._cache)
        logits: torch.Tensor = outputs.logits[:, -1].float()
        return logits

    def _model_of(self, row: Row) -> Any:
        """Return the model that runs a row: the base, or that of its adapter."""
        own = None if row.adapter is None else row.adapter.model
        return self._model if own is None else own

    @staticmethod
    def _make_cache(model: Any) -> dict[str, DynamicCache]:
        """Return an empty cache, as `generate` makes it before the first token, if it does.

        RecurrentGemma uses the one that it is given, and returns none.
        """
        taken = signature(model.forward).parameters
        name = next((name for name in _CACHES if name in taken), None)
        if name is None or not model._supports_default_dynamic_cache():
            return {}
        return {name: DynamicCache(config=model.config.get_text_config(decoder=True))}

    def _positions(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the positions of all tokens so far, as `generate` has them, if that is plain.

        MiniMax would count them in its first layer's cache, which has no tokens.
        """
        own = getattr(type(model), _POSITIONS, None)
        plain = own is getattr(GenerationMixin, _POSITIONS, None)
        if not plain or "position_ids" not in signature(model.forward).parameters:
            return {}
        return {"position_ids": torch.arange(self._seen, device=model.device).unsqueeze(0)}

    @staticmethod
    def _last_logits(model: Any) -> dict[str, int]:
        """Limit the logits to those of the last token, if the model supports that."""
        supports = getattr(model, "_supports_logits_to_keep", lambda: False)
        return {"logits_to_keep": 1} if supports() else {}

    def _count_next(self, row: Row) -> int:
        """Return how many tokens the next forward pass reads."""
        return self._chunk if self._in_pieces() else len(self._unread)

    def _in_pieces(self) -> bool:
        """Return whether the prompt can be read in chunks; a recurrent model reads it whole."""
        cache = next((self._cache[name] for name in _CACHES if name in self._cache), None)
        layers = getattr(self._model.config.get_text_config(), "layer_types", None) or ()
        attends = not getattr(self._model, "_is_stateful", False)
        attends &= "linear_attention" not in layers
        return attends and (cache is None or isinstance(cache, DynamicCache))
