"""The adapters of one model: loaded, verified, served and unloaded.

All slow work happens in the caller's thread, on skeletons, while the engine serves. Only the
installation of a finished adapter into the running model, and its removal, happen between two of
the engine's steps.

    read → config checks → build → verify alone → choose mode → [merge → verify] → install
         → verify in the batch → served

A failure at any point leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.adapter_table import AdapterTable
from servekit.engines.api.base import Job
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.batching import self_check
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.lora import (
    adapter_files,
    batching_mode,
    config_checks,
    peft_model,
    verify,
)
from servekit.engines.transformers.lora.adapter import Adapter
from servekit.engines.transformers.lora.module_clone import (
    ModuleClones,
    clone_modules,
    logits_of,
)
from servekit.engines.transformers.request_row import Row
from servekit.errors import RequestError
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import SamplingParams, WorkerSpec

if TYPE_CHECKING:
    from servekit.engines.transformers.engine import TransformersEngine

#: Number of served adapters beside which a new one is verified.
_NEIGHBOURS = 2
#: Blocks for the two requests that check an adapter's own model.
_BLOCKS = 8


class AdapterManager(AdapterTable[Adapter]):
    """The adapters of one model of the transformers engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str,
        runner: Any,
        spec: WorkerSpec,
        engine: TransformersEngine,
        media: Sequence[Job] = (),
    ) -> None:
        """`media` are prompts with images or recordings, by which the model was proved."""
        super().__init__()
        self._model = model
        self._media = media
        self._attention = attention
        self._runner = runner
        self._spec = spec
        self._engine = engine
        self._skeletons: ModuleClones | None = None
        embedding: Any = model.get_input_embeddings()
        self._vocab_size = int(embedding.weight.shape[0])
        self._tolerance = verify.tolerance_of(model.device, model.dtype)
        self._uids = count(1)
        self._said: dict[str, verify.PromptOutput] = {}  # output of each during its verification

    def _load_new(self, spec: AdapterSpec) -> AdapterInfo:
        try:
            found = adapter_files.read_adapter(spec)
            config_checks.check_config(
                found, self._spec.options.get("max_lora_rank") or config_checks.MAX_RANK
            )
            if not spec.any_base:
                config_checks.require_base(found.config, self._names, self._spec.model)
            skeletons = self._skeletons = self._skeletons or self._clone_base()
            with peft_model.explain_errors(self._spec.model), skeletons.unchanged():
                return self._build_adapter(spec, found, skeletons)
        finally:
            self._collect_garbage()

    def _clone_base(self) -> ModuleClones:
        if not self._media:
            return ModuleClones(self._model, self._attention)
        made: list[ModuleClones] = []  # between steps: the reader of images hooks the modules
        self._engine.between_steps(lambda: made.append(ModuleClones(self._model, self._attention)))
        return made[0]

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter, as `Engine.unload_adapter`."""
        self._forget_adapter(self.get(name))  # no local name: the adapter must be collectable
        self._collect_garbage()

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the adapters, on any device."""
        for adapter in self._served.values():
            yield from _adapter_tensors(adapter)
            if adapter.model is not None:
                yield from adapter.model.parameters()
                yield from adapter.model.buffers()

    def _forget_adapter(self, adapter: Adapter) -> None:
        self._engine.between_steps(lambda: self._runner.remove_adapter(adapter))
        del self._served[adapter.name], self._said[adapter.name]

    # ---------------------------------------------------------------- in steps

    def _build_adapter(
        self, spec: AdapterSpec, found: adapter_files.AdapterFiles, skeletons: ModuleClones
    ) -> AdapterInfo:
        peft, kind = peft_model.build_peft_model(found, skeletons, self._spec.model)
        media = () if kind in batching_mode.PROMPTS else self._media
        alone = verify.verify_alone(peft, skeletons, self._vocab_size, self._tolerance, media)
        choice = batching_mode.choose_mode(kind, peft, skeletons)
        parameters = sum(t.numel() for t in skeletons.own_tensors(peft) if t.is_floating_point())
        figures = dict(alone.figures)
        if choice.mode == "merged":
            peft = batching_mode.merge_adapter(peft)
            figures |= verify.verify_merged(peft, alone, self._vocab_size, self._tolerance)
        adapter = self._make_adapter(spec.name, kind, choice.mode, peft)
        figures |= self._install_verified(adapter, peft, alone, skeletons)
        held = (
            skeletons.own_tensors(adapter.model) if adapter.model else [*_adapter_tensors(adapter)]
        )
        return AdapterInfo(
            name=spec.name,
            kind=kind,
            mode=choice.mode,
            why=self._explain_mode(choice.why, found),
            rank=config_checks.rank_of(found.config),
            parameters=parameters,
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in held),
            figures=figures,
            virtual_tokens=adapter.virtual_tokens,
        )

    def _make_adapter(self, name: str, kind: str, mode: Any, peft: Any) -> Adapter:
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

    def _install_verified(
        self, adapter: Adapter, peft: Any, alone: verify.AdapterOutput, skeletons: ModuleClones
    ) -> dict[str, float]:
        """Install an adapter in the running model, verify it there, and serve it."""
        texts = getattr(self._runner, "texts", self._runner)
        if adapter.model is not None:
            adapter.plain = clone_modules(adapter.model) if self._media else None
            _prepare_paged(adapter.model, texts)
        elif adapter.factors:
            texts.mixing.prepare_kernels()
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()  # written on this thread's stream, read on the engine's
        self._engine.between_steps(lambda: self._runner.install_adapter(adapter))
        try:
            self._record_steps(texts, adapter)
            figures, said = self._try_in_batch(adapter, peft, alone, skeletons)
            if alone.media:
                figures["media_error"] = self._try_media(adapter, peft, alone)
        except BaseException:
            self._engine.between_steps(lambda: self._runner.remove_adapter(adapter))
            raise
        self._said[adapter.name] = said
        self._served[adapter.name] = adapter
        return figures

    def _record_steps(self, runner: Any, adapter: Adapter) -> None:
        """Record the decode steps with adapters, in turns with the steps of running requests."""
        for record in runner.list_recordings(adapter):
            began_s = time.monotonic()
            self._engine.between_steps(torch.no_grad()(record))
            if runner.running:
                time.sleep(time.monotonic() - began_s)

    def _try_in_batch(
        self, adapter: Adapter, peft: Any, alone: verify.AdapterOutput, skeletons: ModuleClones
    ) -> tuple[dict[str, float], verify.PromptOutput]:
        neighbours = list(self._served.values())[-_NEIGHBOURS:]
        own = [self._probe_row(adapter, length) for length in verify.LENGTHS]
        base = self._probe_row(None, verify.LENGTHS[0])
        others = [self._probe_row(other, verify.LENGTHS[-1]) for other in neighbours]
        self._engine.run_rows([base, own[0], *others, own[1]])
        with _plain_attention(adapter.model or skeletons.base, self._attention):
            expected = [self._expected_logits(peft, row) for row in own]
            plain = verify.PromptOutput(
                tuple(base.completion), self._expected_logits(skeletons.base, base)
            )
        tolerance = self._tolerance
        figures = {
            "batch_error": verify.verify_batched(
                [_said_by(row).logits for row in own], expected, alone.effect, tolerance
            ),
            "base_error": verify.verify_undisturbed(
                _said_by(base), plain, tolerance, "the base model"
            ),
        }
        for other, row in zip(neighbours, others, strict=True):
            before = self._said[other.name]
            verify.verify_undisturbed(_said_by(row), before, tolerance, f"adapter {other.name}")
        said = _said_by(own[-1])
        return figures, verify.PromptOutput(said.completion, said.logits.cpu())

    def _try_media(self, adapter: Adapter, peft: Any, alone: verify.AdapterOutput) -> float:
        rows = [self._row_of(adapter, one.job) for one in alone.media]
        self._engine.run_rows(rows)
        plain = adapter.plain or adapter.model or peft.get_base_model()
        errors = []
        for row, before in zip(rows, alone.media, strict=True):
            if not row.noted:
                raise RequestError(
                    "The model cannot read an image or a recording with the adapter.",
                    param=adapter_files.PARAM,
                )
            expected = [
                verify.logits_after_media(plain, before.job, row.completion[:done])
                for done in range(len(row.noted))
            ]
            said = _said_by(row).logits
            errors.append(
                verify.verify_batched(
                    [said], [torch.stack(expected)], before.effect, self._tolerance
                )
            )
        return max(errors)

    def _probe_row(self, adapter: Adapter | None, length: int) -> Row:
        ids = self_check.probe_prompt(length, self._vocab_size)
        return self._row_of(adapter, Job(0, ids, SamplingParams(max_tokens=verify.TOKENS)))

    def _row_of(self, adapter: Adapter | None, job: Job) -> Row:
        job = replace(job, id=-next(self._uids))
        row = Row(f"probe{job.id}", job, Sampling(temperature=0.0), frozenset(), verify.TOKENS)
        row.adapter, row.noted = adapter, []
        return row

    def _expected_logits(self, model: Any, row: Row) -> Tensor:
        return logits_of(model, row.job.prompt_ids + row.completion[:-1], verify.TOKENS)

    @property
    def _names(self) -> set[str]:
        """Return the names of the base."""
        return {self._spec.path, self._spec.model, str(self._model.config._name_or_path)}

    def _explain_mode(self, why: str, found: adapter_files.AdapterFiles) -> str:
        stated = config_checks.other_base(found.config, self._names)
        return f"{why} It was made for {stated}, by name another base." if stated else why

    def _collect_garbage(self) -> None:
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


def _said_by(row: Row) -> verify.PromptOutput:
    return verify.PromptOutput(tuple(row.completion), torch.stack(row.noted or []))


def _adapter_tensors(adapter: Adapter) -> Iterable[Tensor]:
    for factors in adapter.factors.values():
        yield from (factors.down, factors.up)
    if adapter.prompt is not None:
        yield adapter.prompt


def _prepare_paged(model: Any, runner: Any) -> None:
    """Switch an adapter's own model to the runner's attention, and check it in the paged cache.

    It is checked with a separate cache outside the engine's thread: a model that cannot be paged
    may raise in the middle of a step, which would end the engine.

    Raises RequestError if the output differs. Does nothing if requests run one at a time.
    """
    if not isinstance(runner, ContinuousRunner):
        return
    plan = dataclasses.replace(runner.plan, blocks=_BLOCKS, slots=min(4, runner.plan.slots))
    proof = ContinuousRunner(model, plan, by_request=runner.by_request)
    try:
        self_check.check_model(model, proof, runner.plain_attention)
    except (MemoryError, RequestError):
        raise
    except Exception as error:
        raise RequestError(
            f"The model with the adapter cannot share the engine's cache: {error}.",
            param=adapter_files.PARAM,
        ) from error
    finally:
        proof.close()


@contextmanager
def _plain_attention(model: Any, attention: str) -> Iterator[None]:
    """Run the model without the paged cache in the block."""
    own = str(model.config._attn_implementation)
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
