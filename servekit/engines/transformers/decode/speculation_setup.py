"""The speculator that a model's option `speculative` asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from servekit.engines.api.speculation import (
    NgramProposer,
    Proposer,
    Speculator,
    get_speculation,
)
from servekit.engines.transformers.batching import kv_cache, paged_attention
from servekit.engines.transformers.decode import kernels
from servekit.engines.transformers.decode.draft_model import DraftProposer
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

#: Tokens whose arithmetic takes as long as reading the weights once. Measured on a core of an AMD
#: EPYC, 24 with packed weights in float32, and fewer without; for a GPU about half of its ratio of
#: arithmetic to bandwidth.
WEIGHTS_WORTH = {"cpu": 16, "cuda": 128}
#: What a step takes longer, as a share, because it is not started before the tokens of the last one
#: are known.
WAIT_COST = {"cpu": 0.0, "cuda": 0.1}


@dataclass(frozen=True, slots=True)
class Draft:
    """A loaded draft model; `cost` is its size as a share of the model's, until it is timed."""

    model: PreTrainedModel
    cost: float

    @property
    def shape(self) -> kv_cache.Shape:
        return kv_cache.shape_of(self.model.config.get_text_config(), self.model.dtype.itemsize)


def check_draft(draft: PreTrainedModel, name: str) -> None:
    """Raise LoadError if a draft model cannot run in servekit's own steps."""
    full = paged_attention.has_full_attention(draft.config.get_text_config())
    if not full or draft.config._attn_implementation != "sdpa":
        raise LoadError(f"{name} cannot draft: some of its layers do not attend to all tokens.")


def check_tokenizers(tokenizer: Any, of_draft: Any, name: str) -> None:
    """Raise LoadError if the tokens of a draft model are not those of the model."""
    mine, its = tokenizer.get_vocab(), of_draft.get_vocab()
    if differing := len(mine.items() ^ its.items()):
        raise LoadError(
            f"{name} cannot draft: its tokenizer is not the model's, {differing} tokens differ."
        )


def make_speculator(
    spec: WorkerSpec, draft: Draft | None, block_size: int, batch_tokens: int, *, graphs: bool
) -> Speculator | None:
    """Return what `spec` asks for. Raises LookupError if no kernel runs the draft model."""
    if (speculation := get_speculation(spec)) is None:
        return None
    proposer: Proposer[Any] = NgramProposer(speculation)
    if draft is not None:
        kernel = kernels.choose_for_model(draft.model, spec, block_size)
        draft.model.set_attn_implementation(paged_attention.NAME)
        proposer = DraftProposer(
            *(draft.model, draft.shape, draft.cost, kernel),
            graphs=graphs and kernel.captured,
            chunk=batch_tokens,
        )
    return Speculator(proposer, speculation, WEIGHTS_WORTH[spec.device], WAIT_COST[spec.device])
