"""The adapters of one model: loaded, verified, served and unloaded.

All slow work happens in the caller's thread, on skeletons, while the engine serves. Only the
installation of a finished adapter into the running model, and its removal, happen between two of
the engine's steps.

    read → config checks → build → verify alone → choose mode → [merge → verify] → install
         → verify in the batch → served

A failure at any point leaves nothing behind.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.base import Job
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.lora import (
    adapter_files,
    batching_mode,
    config_checks,
    paged_model,
    peft_model,
    tolerance,
    verify,
)
from servekit.engines.transformers.lora.adapter import Adapter
from servekit.engines.transformers.lora.module_clone import ModuleClones, logits_of
from servekit.engines.transformers.request_row import Row
from servekit.errors import LoadError, RequestError
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import SamplingParams, WorkerSpec

log: Any = structlog.get_logger(__name__)

#: Number of served adapters beside which a new one is verified.
_NEIGHBOURS = 2


class Host(Protocol):
    """The engine as seen by `AdapterManager`; both methods block."""

    def between_steps(self, work: Callable[[], None]) -> None:
        """Run `work` in the engine's thread, between two steps."""

    def run_rows(self, rows: list[Row]) -> None:
        """Run rows to completion in the engine's batches, without emitting their output."""


class AdapterManager:
    """The adapters of one model; `load` and `unload` are called by one thread at a time."""

    def __init__(
        self, model: PreTrainedModel, attention: str, runner: Any, spec: WorkerSpec, host: Host
    ) -> None:
        self._model = model
        self._attention = attention
        self._runner = runner
        self._spec = spec
        self._host = host
        self._skeletons: ModuleClones | None = None
        embedding: Any = model.get_input_embeddings()
        self._vocab_size = int(embedding.weight.shape[0])
        self._tolerance = tolerance.of(model.device, model.dtype)
        self._uids = count(1)
        self._served: dict[str, Adapter] = {}
        self._said: dict[str, verify.Said] = {}  # output of each during its verification

    def get(self, name: str) -> Adapter:
        """Return the adapter that a job names. Raises RequestError if it is not loaded."""
        found = self._served.get(name)
        if found is None:
            raise RequestError(f"This model has no adapter {name!r}.", param="model")
        return found

    def load_all(
        self, specs: Iterable[AdapterSpec]
    ) -> tuple[tuple[AdapterInfo, ...], dict[str, str]]:
        """Load all possible adapters; return the reasons for the refused ones by name."""
        loaded, refused = [], {}
        for spec in specs:
            try:
                loaded.append(self.load(spec))
            except (RequestError, LoadError) as error:
                log.warning("adapter_refused", adapter=spec.name, reason=str(error))
                refused[spec.name] = str(error)
        return tuple(loaded), refused

    def load(self, spec: AdapterSpec) -> AdapterInfo:
        """Load an adapter, as `Engine.load_adapter`."""
        if spec.name in self._served:
            raise RequestError(
                f"An adapter {spec.name!r} is loaded already; unload it first.", param="lora_name"
            )
        try:
            found = adapter_files.read(spec)
            config_checks.check(
                found, self._spec.options.get("max_lora_rank") or config_checks.MAX_RANK
            )
            if not spec.any_base:
                config_checks.require_base(found.config, self._names, self._spec.model)
            skeletons = self._skeletons or ModuleClones(self._model, self._attention)
            self._skeletons = skeletons
            with peft_model.explained(self._spec.model), skeletons.unchanged():
                return self._load(spec, found, skeletons)
        except LoadError as error:
            if not error.permanent:
                raise
            raise RequestError(str(error), param=adapter_files.PARAM) from error
        finally:
            self._collect()

    def unload(self, name: str) -> None:
        """Unload an adapter, as `Engine.unload_adapter`."""
        self._forget(self.get(name))  # no local name: the adapter must be collectable
        self._collect()

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the adapters, on any device."""
        for adapter in self._served.values():
            yield from _tensors(adapter)
            if adapter.model is not None:
                yield from adapter.model.parameters()
                yield from adapter.model.buffers()

    def _forget(self, adapter: Adapter) -> None:
        self._host.between_steps(lambda: self._runner.remove(adapter))
        del self._served[adapter.name], self._said[adapter.name]

    # ---------------------------------------------------------------- in steps

    def _load(
        self, spec: AdapterSpec, found: adapter_files.AdapterFiles, skeletons: ModuleClones
    ) -> AdapterInfo:
        peft, kind = peft_model.build(found, skeletons, self._spec.model)
        alone = verify.alone(peft, skeletons, self._vocab_size, self._tolerance)
        choice = batching_mode.choose(kind, peft, skeletons)
        parameters = sum(t.numel() for t in skeletons.own(peft) if t.is_floating_point())
        figures = dict(alone.figures)
        if choice.mode == "merged":
            peft = batching_mode.merge(peft)
            figures |= verify.merged(peft, alone, self._vocab_size, self._tolerance)
        adapter = self._adapter(spec.name, kind, choice.mode, peft)
        figures |= self._install(adapter, peft, alone, skeletons)
        held = skeletons.own(adapter.model) if adapter.model else [*_tensors(adapter)]
        return AdapterInfo(
            name=spec.name,
            kind=kind,
            mode=choice.mode,
            why=self._why(choice.why, found),
            rank=config_checks.rank_of(found.config),
            parameters=parameters,
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in held),
            figures=figures,
            virtual_tokens=adapter.virtual_tokens,
        )

    def _adapter(self, name: str, kind: str, mode: Any, peft: Any) -> Adapter:
        adapter = Adapter(name, next(self._uids), mode)
        if mode == "merged":
            adapter.model = peft
        elif mode == "grouped":
            adapter.model = peft.get_base_model()
        elif kind in batching_mode.PROMPTS:
            adapter.prompt = _virtual_tokens(peft)
        else:
            adapter.factors = batching_mode.factors_of(peft)
        return adapter

    def _install(
        self, adapter: Adapter, peft: Any, alone: verify.Alone, skeletons: ModuleClones
    ) -> dict[str, float]:
        """Install an adapter in the running model, verify it there, and serve it."""
        if adapter.model is not None:
            paged_model.prepare(adapter.model, self._runner)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()  # written on this thread's stream, read on the engine's
        self._host.between_steps(lambda: self._runner.install(adapter))
        try:
            figures, said = self._try_in_batch(adapter, peft, alone, skeletons)
        except BaseException:
            self._host.between_steps(lambda: self._runner.remove(adapter))
            raise
        self._said[adapter.name] = said
        self._served[adapter.name] = adapter
        return figures

    def _try_in_batch(
        self, adapter: Adapter, peft: Any, alone: verify.Alone, skeletons: ModuleClones
    ) -> tuple[dict[str, float], verify.Said]:
        neighbours = list(self._served.values())[-_NEIGHBOURS:]
        own = [self._row(adapter, length) for length in verify.LENGTHS]
        base = self._row(None, verify.LENGTHS[0])
        others = [self._row(other, verify.LENGTHS[-1]) for other in neighbours]
        self._host.run_rows([base, own[0], *others, own[1]])
        with paged_model.plainly(adapter.model or skeletons.base, self._attention):
            expected = [self._expected(peft, row) for row in own]
            plain = verify.Said(tuple(base.completion), self._expected(skeletons.base, base))
        tolerance = self._tolerance
        figures = {
            "batch_error": verify.batched(
                [_said(row).logits for row in own], expected, alone.effect, tolerance
            ),
            "base_error": verify.disturbed(_said(base), plain, tolerance, "the base model"),
        }
        for other, row in zip(neighbours, others, strict=True):
            before = self._said[other.name]
            verify.disturbed(_said(row), before, tolerance, f"adapter {other.name}")
        said = _said(own[-1])
        return figures, verify.Said(said.completion, said.logits.cpu())

    def _row(self, adapter: Adapter | None, length: int) -> Row:
        ids = verify.prompt(length, self._vocab_size)
        job = Job(-next(self._uids), ids, SamplingParams(max_tokens=verify.TOKENS))
        row = Row(f"probe{job.id}", job, Sampling(temperature=0.0), frozenset(), verify.TOKENS)
        row.adapter, row.noted = adapter, []
        return row

    def _expected(self, model: Any, row: Row) -> Tensor:
        return logits_of(model, row.job.prompt_ids + row.completion[:-1], verify.TOKENS)

    @property
    def _names(self) -> set[str]:
        """Return the names of the base."""
        return {self._spec.path, self._spec.model, str(self._model.config._name_or_path)}

    def _why(self, why: str, found: adapter_files.AdapterFiles) -> str:
        stated = config_checks.other_base(found.config, self._names)
        return f"{why} It was made for {stated}, by name another base." if stated else why

    def _collect(self) -> None:
        """Free memory; PEFT's modules form reference cycles."""
        gc.collect()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _virtual_tokens(peft: Any) -> Tensor:
    """Return the virtual tokens' embeddings [virtual tokens, hidden size] in the model's dtype."""
    rows: Tensor = peft.get_prompt(batch_size=1)[0]
    weight = peft.get_base_model().get_input_embeddings().weight
    return rows.detach().to(weight.dtype).clone()


def _said(row: Row) -> verify.Said:
    return verify.Said(tuple(row.completion), torch.stack(row.noted or []))


def _tensors(adapter: Adapter) -> Iterable[Tensor]:
    for factors in adapter.factors.values():
        yield from (factors.down, factors.up)
    if adapter.prompt is not None:
        yield adapter.prompt
