"""Runners of requests with images, which run one at a time, beside the batch of the others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.base import StepOutput
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner import CausalRunner
from servekit.engines.transformers.sequential import StaticRunner
from servekit.errors import describe_error
from servekit.protocol.messages import ModelInfo

#: Errors of a model's Python code for inputs that do not fit together. A plain RuntimeError is one
#: of shapes; those of a failed device are subclasses.
_MISFITS = (ValueError, TypeError, LookupError)


class ImageRunner(StaticRunner):
    """Runner of one row at a time, with images or without, by the calls of `generate`.

    A prompt is read whole: models may attend to an image in both directions, and find the places of
    images in it. The tokens of another worker are read one by one, as they were generated.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        super().__init__(model, capacity, chunk=0)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._begun = False  # the row's prompt has been read

    def step(self) -> list[tuple[Row, StepOutput]]:
        """Read the prompt, or a token of another worker, or generate a token."""
        try:
            return super().step()
        except Exception as error:
            row = self._row
            if row is None or row.job.images is None or (output := self._refuse(error)) is None:
                raise
            self._drop_row()
            output.id = row.job.id
            return [(row, output)]

    def _refuse(self, error: Exception) -> StepOutput | None:
        """Return the end of a request whose images the model cannot read; None: a step failed."""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return StepOutput(
                0, [], error="There is no memory left for the images of this request."
            )
        if self._begun or not (isinstance(error, _MISFITS) or type(error) is RuntimeError):
            return None
        why = f"messages: the model cannot read these images: {describe_error(error)}"
        return StepOutput(0, [], error=why, param="messages")

    def _begin_row(self, row: Row) -> Row:
        self._begun = False
        return super()._begin_row(row)

    def _count_next(self, row: Row) -> int:
        return 1 if self._begun else row.virtual_tokens + len(row.job.prompt_ids)

    def _read_tokens(self, row: Row) -> Tensor:
        if not self._begun:
            self._cache = self._prepare_first(row)
        logits = super()._read_tokens(row)
        self._begun = True
        return logits

    def _prepare_first(self, row: Row) -> dict[str, Any]:
        """Return the model's arguments for the prompt, beside its ids."""
        own = None if row.adapter is None else row.adapter.model
        model: Any = self._model if own is None else own
        made: Any = row.job.images or {}
        inputs = {name: _move(tensor, model) for name, tensor in made.items()}
        if self._takes_positions:
            ids = torch.tensor([row.context[: self._count_next(row)]], device=model.device)
            known = inputs | {"attention_mask": torch.ones_like(ids)}
            inputs["position_ids"] = model._prepare_position_ids_for_generation(ids, known)
        return inputs


def _move(value: Any, model: Any) -> Any:
    """Return a tensor on the model's device and, if of real numbers, in its dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


class ImagesBeside:
    """Runner of texts in a batch, and of requests with images one at a time; they take turns."""

    def __init__(self, texts: CausalRunner, images: ImageRunner) -> None:
        self.texts = texts
        self._images = images
        self.capacity = texts.capacity

    @property
    def running(self) -> int:
        return self.texts.running + self._images.running

    @property
    def waiting(self) -> int:
        return self.texts.waiting + self._images.waiting

    @property
    def kv_used(self) -> float:
        return max(self.texts.kv_used, self._images.kv_used)

    def add(self, row: Row) -> None:
        self._runner_of(row).add(row)

    def add_first(self, row: Row) -> None:
        self._runner_of(row).add_first(row)

    def cancel(self, row: Row) -> None:
        self._runner_of(row).cancel(row)

    def step(self) -> list[tuple[Row, StepOutput]]:
        """Run a step of the batch, and one of the request with images that has its turn."""
        busy = [one for one in (self.texts, self._images) if one.running or one.waiting]
        return list(chain.from_iterable(one.step() for one in busy))

    def tensors(self) -> Iterable[Tensor]:
        return self.texts.tensors()

    def make_pages(self) -> None:
        self.texts.make_pages()

    def drop_pages(self) -> None:
        self._images.drop_pages()
        self.texts.drop_pages()

    def close(self) -> None:
        self._images.close()
        self.texts.close()

    def _runner_of(self, row: Row) -> CausalRunner:
        return self.texts if row.job.images is None else self._images


def add_images(
    texts: CausalRunner, model: PreTrainedModel, twin: PreTrainedModel, info: ModelInfo
) -> tuple[ImageRunner | ImagesBeside, ModelInfo]:
    """Return the runner that also takes rows with images.

    `twin` is a second tree of the model's modules, with the attention that the model came with.
    """
    if isinstance(texts, StaticRunner):
        return ImageRunner(model, texts.capacity), info
    beside = ImagesBeside(texts, ImageRunner(twin, texts.capacity))
    return beside, replace(info, detail=f"{info.detail}; with images, one request at a time")
