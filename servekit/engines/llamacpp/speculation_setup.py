"""The speculator that a model's option `speculative` asks for, with the costs that it reckons with.

How many tokens are worth reading together depends on the format of the weights and on the machine:
llama.cpp has other kernels for a token alone than for several. So it is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from servekit.engines.api.base import Job
from servekit.engines.api.speculation import NgramProposer, Proposer, Speculation, Speculator
from servekit.engines.llamacpp.draft_model import DraftProposer
from servekit.engines.llamacpp.loading import Loaded
from servekit.engines.llamacpp.model import Context
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.text.sampling_params import Sampling
from servekit.errors import LoadError, describe_error
from servekit.protocol.messages import SamplingParams

#: Passes of which the fastest counts: others may be slowed down by other work.
_TRIES = 5
#: More tokens are never taken to be worth the reading of the weights.
_MOST_WORTH = 128.0


def make_speculator(speculation: Speculation, loaded: Loaded) -> tuple[Speculator, str]:
    """Return the speculator, and a description for people.

    Raises LoadError if the draft model proposes nothing.
    """
    together = min(1 + speculation.tokens, loaded.context.batch_tokens)
    one_s, all_s = time_passes(loaded.context, (1, together))
    proposer: Proposer[Any] = NgramProposer(speculation)
    if loaded.draft is not None:
        try:
            proposer = DraftProposer(loaded.draft, loaded.model.vocabulary.size)
            proposer.cost = time_passes(loaded.draft.context, (1,))[0] / one_s
            _check_proposals(proposer)
        except Exception as error:
            why = describe_error(error)
            raise LoadError(f"options.speculative: no tokens can be proposed: {why}") from error
    speculator = Speculator(proposer, speculation, estimate_worth(together, all_s / one_s))
    return speculator, f"{speculator.how}: {together} take {all_s / one_s:.1f} × the time of one"


def estimate_worth(tokens: int, ratio: float) -> float:
    """Return how many tokens' arithmetic takes as long as reading the weights once.

    A pass over so many tokens takes `ratio` times as long as one over a single token. With W tokens
    worth the weights it is (tokens + W) / (1 + W).
    """
    if ratio >= tokens:
        return 0.0
    least = (tokens + _MOST_WORTH) / (1 + _MOST_WORTH)
    return _MOST_WORTH if ratio <= least else (tokens - ratio) / (ratio - 1)


def time_passes(context: Context, counts: Sequence[int]) -> list[float]:
    """Return the seconds of passes over so many tokens, with the logits of all."""
    best_s = [math.inf] * len(counts)
    for _ in range(_TRIES):
        for at, tokens in enumerate(counts):
            context.clear_batch()
            context.put(0, 0, range(tokens), output=True, every=True)
            began_s = time.perf_counter()
            context.decode_batch()
            best_s[at] = min(best_s[at], time.perf_counter() - began_s)
            context.cut_sequence(0, 0)
    return best_s


def _check_proposals(proposer: DraftProposer) -> None:
    """Have a token proposed; whatever fails is raised."""
    job = Job(-1, [0], SamplingParams(max_tokens=2))
    row = LlamaRow("proof", job, Sampling(temperature=0.0), frozenset(), 2)
    proposer.propose({row.key: (row, 1)})
    proposer.forget(row.key)
