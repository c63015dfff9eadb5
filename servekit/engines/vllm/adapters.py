"""LoRA adapters in vLLM: checked as for the transformers engine, and tried before they are served.

vLLM mixes them in one batch with kernels of its own. It supports neither other tuners nor DoRA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from servekit.engines.api.adapter_table import AdapterTable
from servekit.engines.transformers.lora import adapter_files, config_checks
from servekit.engines.transformers.lora.adapter_files import PARAM, AdapterFiles
from servekit.engines.vllm.core.core_client import Core
from servekit.errors import LoadError, RequestError
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import WorkerSpec

#: The result of a probe: for each generated token, the log probabilities of the best candidates.
Scores = list[tuple[float, ...]]
#: Function that returns the scores after a prompt, with an adapter's id or 0.
Probe = Callable[[list[int], int], Scores]

_PROMPT_TOKENS = 11
WHY = "vLLM mixes LoRA adapters in one batch."


class Adapters(AdapterTable[Any]):
    """The loaded adapters, as `LoRARequest`s."""

    def __init__(
        self, spec: WorkerSpec, names: Collection[str], max_rank: int, core: Core, probe: Probe
    ) -> None:
        super().__init__()
        self._spec = spec
        self._names = set(names)
        self._max_rank = max_rank
        self._core = core
        self._probe = probe
        self._next = 1

    def _load_new(self, spec: AdapterSpec) -> AdapterInfo:
        found = adapter_files.read_adapter(spec)
        judge_config(found, self._max_rank)
        if not spec.any_base:
            config_checks.require_base(found.config, self._names, self._spec.model)
        return self._take_adapter(spec, found)

    def _take_adapter(self, spec: AdapterSpec, found: AdapterFiles) -> AdapterInfo:
        from vllm.lora.request import LoRARequest

        number, self._next = self._next, self._next + 1
        # vLLM's prefix cache distinguishes adapters by name: entries of an earlier adapter of this
        # name must not be found.
        request = LoRARequest(f"{spec.name}#{number}", number, str(found.folder))
        try:
            self._core.call("add_lora", request)
        except Exception as error:  # vLLM reports every error of the core as this type
            raise RequestError(
                f"vLLM cannot load the adapter: {str(error)[:500]}", param=PARAM
            ) from error
        try:
            figures = self._verify_effect(number)
        except BaseException:
            self._core.call("remove_lora", number)
            raise
        self._served[spec.name] = request
        parameters = sum(math.prod(shape) for shape in found.shapes.values())
        rank = config_checks.rank_of(found.config)
        return AdapterInfo(
            spec.name, "LORA", "mixed", WHY, rank, parameters, 2 * parameters, figures
        )

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter; see `Engine.unload_adapter`."""
        self._core.call("remove_lora", self.get(name).lora_int_id)
        del self._served[name]

    def restore(self) -> None:
        """Load all adapters again, after the device has lost them."""
        for request in self._served.values():
            self._core.call("remove_lora", request.lora_int_id)
            self._core.call("add_lora", request)

    def _verify_effect(self, number: int) -> dict[str, float]:
        prompt = [(7919 * (index + 1)) % self._vocab for index in range(_PROMPT_TOKENS)]
        return {"effect": measure_effect(self._probe(prompt, number), self._probe(prompt, 0))}

    @property
    def _vocab(self) -> int:
        return int(self._core.config.model_config.get_vocab_size())


def judge_config(found: AdapterFiles, max_rank: int) -> None:
    """Raise RequestError if vLLM does not support the adapter's configuration."""
    kind = found.config.get("peft_type")
    if kind != "LORA" or found.config.get("use_dora"):
        named = "DoRA" if kind == "LORA" else str(kind)
        raise RequestError(
            f"vLLM runs LoRA adapters only, and this one is {named}; `engine: transformers` "
            "serves it.",
            param=PARAM,
        )
    config_checks.check_config(found, max_rank)


def measure_effect(with_it: Scores, without: Scores) -> float:
    """Return the largest change of a log probability by the adapter.

    Raises RequestError if nothing changes, or if a value is not finite; LoadError if a probe
    failed. Only the first token is compared, because the second may follow a different first one.
    """
    if not (with_it and without):
        raise LoadError("vLLM gave a probe of the adapter up; its log says why.", permanent=False)
    if not all(math.isfinite(value) for scores in with_it for value in scores):
        raise RequestError("The model's logits are NaN or Inf with the adapter.", param=PARAM)
    changes = [abs(a - b) for a, b in zip(with_it[0], without[0], strict=True)]
    if not any(changes):
        raise RequestError(
            "The adapter changes nothing: the model says with it what it says without.", param=PARAM
        )
    return max(changes)
