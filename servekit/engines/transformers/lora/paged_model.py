"""An adapter's own model, over the engine's paged cache.

The model is first checked with a separate cache outside the engine's thread: a model that cannot be
paged may raise in the middle of a step, which would end the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from servekit.engines.transformers.batching import self_check
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.lora.adapter_files import PARAM
from servekit.errors import RequestError

#: Enough for the check's two requests.
_BLOCKS = 8


def prepare(model: Any, runner: Any) -> None:
    """Switch the model to the runner's attention, and check its output in the paged cache.

    Raises RequestError if the output differs. Does nothing if requests run one at a time.
    """
    if not isinstance(runner, ContinuousRunner):
        return
    plan = replace(runner.plan, blocks=_BLOCKS, slots=min(4, runner.plan.slots))
    proof = ContinuousRunner(model, plan, by_request=runner.by_request)
    try:
        self_check.check(model, proof, runner.plain_attention)
    except (MemoryError, RequestError):
        raise
    except Exception as error:
        raise RequestError(
            f"The model with the adapter cannot share the engine's cache: {error}.", param=PARAM
        ) from error
    finally:
        proof.close()


@contextmanager
def plainly(model: Any, attention: str) -> Iterator[None]:
    """Run the model without the paged cache in the block."""
    own = str(model.config._attn_implementation)
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
