"""Probes: requests of the engine itself, in addition to those of clients."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

from servekit.engines.api.base import MediaPrompt
from servekit.engines.vllm.adapters import Scores
from servekit.engines.vllm.core.core_client import Core
from servekit.engines.vllm.requests import make_request
from servekit.errors import LoadError

_PATIENCE_S = 120.0
_LOGPROBS = 20
_TOKENS = 2


class Probes:
    """A sender of probes, for any thread but the engine's loop, which calls `deliver`."""

    def __init__(self, core: Core, patience_s: float = _PATIENCE_S) -> None:
        self._core = core
        self._patience_s = patience_s
        self._serial = itertools.count()
        self._open: dict[str, tuple[Future[Any], list[Any]]] = {}

    def scores(self, prompt: list[int], adapter: int) -> Scores:
        """Return the log probabilities of the best tokens after a prompt, in descending order.

        One tuple for each of two generated tokens; `adapter` is a LoRA's number, 0 for none. Raises
        LoadError if no answer comes.
        """
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=_TOKENS,
            ignore_eos=True,
            logprobs=_LOGPROBS,
            detokenize=False,
        )
        lora = LoRARequest(f"probe#{adapter}", adapter, "/") if adapter else None
        outputs = self._ask_core(prompt, lora, sampling_params=params)
        return [
            tuple(map(float, row))
            for output in outputs
            if output.new_logprobs is not None
            for row in output.new_logprobs.logprobs[: len(output.new_token_ids)]
        ]

    def read_media(self, prompt: MediaPrompt) -> None:
        """Let the model answer a prompt with images or recordings. Raises LoadError."""
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self._ask_core(prompt.ids, None, sampling_params=params, mm_features=prompt.inputs)

    def width(self, task: str = "embed") -> int:
        """Return the size of an embedding, or with "classify" the number of labels.

        Raises LoadError.
        """
        from vllm.pooling_params import PoolingParams

        kind: Any = PoolingParams
        outputs = self._ask_core([0, 1], None, pooling_params=kind(task=task))
        return next(int(one.pooling_output.numel()) for one in outputs if one.finished)

    def _ask_core(self, prompt: list[int], lora: Any, **params: Any) -> list[Any]:
        name = f"probe#{next(self._serial)}"
        answer: Future[Any] = Future()
        self._open[name] = (answer, [])
        try:
            self._core.add([make_request(name, prompt, lora, **params)])
            answer.result(self._patience_s)
            return self._open[name][1]
        except TimeoutError:
            raise LoadError("vLLM did not answer a probe.", permanent=False) from None
        finally:
            del self._open[name]
            if not answer.done():  # nobody waits for the answer any more
                self._core.abort_jobs([name])

    def deliver(self, output: Any) -> None:
        """Take an output that belongs to no client's request."""
        answer, outputs = self._open.get(output.request_id, (None, []))
        if answer is not None:
            outputs.append(output)
            if output.finished:
                answer.set_result(None)

    def fail_all(self, error: BaseException) -> None:
        """Fail all open probes, because the core is dead."""
        for answer, _ in list(self._open.values()):
            if not answer.done():
                answer.set_exception(error)
