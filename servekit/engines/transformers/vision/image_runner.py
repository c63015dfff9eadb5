"""Runners of requests with images or recordings: in the batch of the others, or beside it.

What is said of images here and in `image_reader` goes for recordings, too: the model's own forward
puts the embeddings of both in their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.base import Job, StepOutput
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.batching import self_check
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.lora.adapter import Adapter
from servekit.engines.transformers.lora.batched_lora import BatchedLora, Part
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner import CausalRunner
from servekit.engines.transformers.sequential import StaticRunner
from servekit.engines.transformers.tensor_parallel.controller import Ranks
from servekit.engines.transformers.vision.image_reader import (
    ImageReader,
    NotBatchable,
    prepare_inputs,
)
from servekit.errors import RequestError, describe_error
from servekit.protocol.messages import SamplingParams

#: Errors of a model's Python code for inputs that do not fit together. A plain RuntimeError is one
#: of shapes; those of a failed device are subclasses.
_MISFITS = (ValueError, TypeError, LookupError)


class ImageRunner(StaticRunner):
    """Runner of one row at a time, with images or without, by the calls of `generate`.

    A prompt is read whole: models may attend to an image in both directions, and find the places of
    images in it. The tokens of another worker are read one by one, as they were generated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        mixing: BatchedLora | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(model, capacity, chunk=0, mixing=mixing)
        self.ranks = ranks
        self._begun = False  # the row's prompt has been read

    def step(self) -> list[tuple[Row, StepOutput]]:
        """Read the prompt, or a token of another worker, or generate a token."""
        try:
            return super().step()
        except Exception as error:
            row = self._row
            if row is None or row.job.media is None:
                raise
            if (output := _refuse(row, error, self.ranks, begun=self._begun)) is None:
                raise
            self._drop_row()
            return [(row, output)]

    def read_media(self, jobs: Sequence[Job]) -> None:
        """Read the images of jobs. Raises RequestError, or anything of the model, if it cannot."""
        for job in jobs:
            self.logits_after(job, ())

    def place_media(self, jobs: Sequence[Job]) -> str:
        """Return for people how images run."""
        return "as texts"

    def logits_after(self, job: Job, tokens: Sequence[int]) -> Tensor:
        """Return the logits after a job's prompt and tokens, float32 [vocabulary]."""
        params = SamplingParams(max_tokens=len(tokens) + 1)
        row = _probe_row(replace(job, emitted=list(tokens), params=params))
        noted: list[Tensor] = []
        row.noted = noted
        self.add(row)
        while self.running or self.waiting:
            for _, output in self.step():
                if output.error is not None:
                    raise RequestError(output.error)
        return noted[0]

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
        model = self._model_of(row)
        ids = torch.tensor([row.context[: self._count_next(row)]], device=model.device)
        return prepare_inputs(model, ids, row.job.media)

    def _model_of(self, row: Row) -> Any:
        plain = None if row.adapter is None else row.adapter.plain
        return super()._model_of(row) if plain is None else plain


class ImagesBeside:
    """Runner of texts in a batch, and of images in the same one if that proves right.

    Otherwise, and where a model reads certain prompts by its own forward only, requests with images
    run one at a time, and take turns with the batch.
    """

    def __init__(self, texts: ContinuousRunner, alone: ImageRunner, model: PreTrainedModel) -> None:
        """`model` is a tree of modules that no batch has changed, that of `alone`."""
        self.texts = texts
        self._alone = alone
        self.unbatched = model
        self._reader = ImageReader(model)
        self._batches = False
        self.capacity = texts.capacity

    @property
    def running(self) -> int:
        return self.texts.running + self._alone.running

    @property
    def waiting(self) -> int:
        return self.texts.waiting + self._alone.waiting

    @property
    def kv_used(self) -> float:
        return max(self.texts.kv_used, self._alone.kv_used)

    def add(self, row: Row) -> None:
        self._runner_of(row).add(row)

    def add_first(self, row: Row) -> None:
        self._runner_of(row).add_first(row)

    def cancel(self, row: Row) -> None:
        self._alone.cancel(row)
        self.texts.cancel(row)

    def step(self) -> list[tuple[Row, StepOutput]]:
        """Run a step of the batch, and one of the request with images that has its turn."""
        busy = [one for one in (self.texts, self._alone) if one.running or one.waiting]
        return list(chain.from_iterable(one.step() for one in busy))

    def install_adapter(self, adapter: Adapter) -> None:
        """Allow rows with this adapter."""
        self.texts.install_adapter(adapter)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter that no row uses any more."""
        self.texts.remove_adapter(adapter)

    def tensors(self) -> Iterable[Tensor]:
        return self.texts.tensors()

    def make_pages(self) -> None:
        self.texts.make_pages()

    def drop_pages(self) -> None:
        self._alone.drop_pages()
        self.texts.drop_pages()

    def close(self) -> None:
        self._alone.close()
        self.texts.close()

    def read_media(self, jobs: Sequence[Job]) -> None:
        """Read the images of jobs. Raises RequestError, or anything of the model, if it cannot."""
        self._alone.read_media(jobs)

    def place_media(self, jobs: Sequence[Job]) -> str:
        """Put images into the batch if jobs together have the logits of each alone.

        Returns for people how images run.
        """
        try:
            rows = [_probe_row(job) for job in jobs]
            for row in rows:
                row.images = self._reader.read_images(row.job)
            self.texts.take_images(self._read_images)
            self._batches = True
            self._compare_logits(rows)
            return "in the batch"
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # of the model in the batch, which texts do not need for this
            why = str(error) if isinstance(error, NotBatchable) else describe_error(error)
        if self._batches:
            self._batches = False
            self.texts.drop_pages()
            self.texts.make_pages()
        return f"one at a time: {why}"

    def _compare_logits(self, rows: Sequence[Row]) -> None:
        try:
            batched = self.texts.logits_of(rows)
        finally:
            for row in rows:  # whose step has failed
                self.texts.cancel(row)
        errors = []
        for row in rows:
            for done, found in enumerate(batched[row.key]):
                alone = self._alone.logits_after(row.job, row.completion[:done])
                errors.append(self_check.relative_error(found, alone))
        self_check.check_errors(self.unbatched, errors)

    def _read_images(self, row: Row) -> StepOutput | None:
        adapter = row.adapter
        own = None if adapter is None else adapter.plain
        reader = self._reader if own is None else ImageReader(own)
        self.texts.mixing.lay_out_alone(Part(adapter, 0, len(row.job.prompt_ids)))
        try:
            row.images = reader.read_images(row.job)
        except NotBatchable:
            self._alone.add(row)
        except Exception as error:
            if (output := _refuse(row, error, self._alone.ranks, begun=False)) is None:
                raise
            return output
        finally:
            self.texts.mixing.step = None
        return None

    def _runner_of(self, row: Row) -> CausalRunner:
        return self._alone if row.job.media is not None and not self._batches else self.texts


def _refuse(row: Row, error: Exception, ranks: Ranks | None, *, begun: bool) -> StepOutput | None:
    """Return the end of a request whose images the model cannot read; None: a step failed."""
    if ranks is not None and ranks.left_behind:
        return None
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        why = "There is no memory left for the images or recordings of this request."
        return StepOutput(row.job.id, [], error=why)
    if begun or not (isinstance(error, _MISFITS) or type(error) is RuntimeError):
        return None
    why = f"messages: the model cannot read these images or recordings: {describe_error(error)}"
    return StepOutput(row.job.id, [], error=why, param="messages")


def _probe_row(job: Job) -> Row:
    return Row(f"image{job.id}", job, Sampling(0.0), frozenset(), job.params.max_tokens or 1)


def add_images(
    texts: CausalRunner,
    model: PreTrainedModel,
    twin: PreTrainedModel,
    ranks: Ranks | None = None,
) -> ImageRunner | ImagesBeside:
    """Return the runner that also takes rows with images.

    `twin` is a second tree of the model's modules, with the attention that the model came with.
    """
    if isinstance(texts, ContinuousRunner):
        if ranks is not None:
            ranks.runs_tokens = texts.reads_no_images
        texts.mixing.add_tree(twin)
        return ImagesBeside(texts, ImageRunner(twin, texts.capacity, texts.mixing, ranks), twin)
    return ImageRunner(model, texts.capacity, ranks=ranks)
