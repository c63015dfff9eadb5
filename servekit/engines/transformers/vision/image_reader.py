"""Images of a prompt as the decoder reads them: embeddings with positions of their own.

The model's own forward runs up to its decoder, where its arguments are taken. So the vision part,
its projection, and the places and positions of images are those of the library, for every model
whose decoder takes no more than `ImageReader` knows.
"""

from __future__ import annotations

import hashlib
import inspect
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from servekit.engines.api.base import Job

#: The decoder's arguments for vectors that are added to the output of its first layers: which
#: tokens they are for, and the vectors of each layer (Qwen3-VL).
MASK, ADDED = "visual_pos_masks", "deepstack_visual_embeds"
#: Arguments of the decoder that say nothing of images.
_PLAIN = ("input_ids", "cache", "past_key_values", "cache_position")
_MASK30 = 0x3FFFFFFF  # the library hashes tokens as signed 32-bit numbers


class NotBatchable(Exception):
    """Raised if a prompt with images has to be read by the model's own forward, alone."""


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, on the CPU.

    `places` are the tokens that stand for images; `rows` are their embeddings [places, hidden], and
    `added` what the first layers add to them, [places, hidden] each. `positions` are those of all
    tokens of the prompt, int64 [parts, tokens], if they are not its places; later tokens have
    their place and `shift`. `marks` stand for the images where prompts are compared: 30 bits each.
    """

    places: list[int]
    rows: Tensor
    added: list[Tensor]
    positions: Tensor | None
    shift: int
    marks: list[int]

    def find_span(self, past: int, count: int) -> slice:
        """Return which of the `places` are among `count` tokens after `past`."""
        return slice(bisect_left(self.places, past), bisect_left(self.places, past + count))

    def positions_of(self, past: int, count: int) -> Tensor:
        """Return the positions of `count` tokens after `past`, int64 [parts, count]."""
        assert self.positions is not None
        known = self.positions[:, past : past + count]
        first = past + known.shape[1]
        later = torch.arange(first, past + count) + self.shift
        return torch.cat([known, later.expand(len(known), -1)], dim=1)

    def mark_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return a prompt's tokens, and what follows it, with the marks of its images."""
        marked = list(tokens)
        for place, mark in zip(self.places, self.marks, strict=True):
            marked[place] = mark
        return marked


class ImageReader:
    """The reader of a model's images, through a tree of its modules that no batch has changed."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder: nn.Module = self._model.get_decoder()

    @torch.no_grad()
    def read_images(self, job: Job) -> PromptImages:
        """Return the images of a job's prompt. Raises NotBatchable, or anything of the model."""
        ids = torch.tensor([job.prompt_ids], device=self._model.device)
        embedding: Any = self._model.get_input_embeddings()
        if max(job.prompt_ids) >= embedding.weight.shape[0]:
            raise NotBatchable("the tokens of images are not in its embedding")
        seen = self._run_to_decoder(ids, prepare_inputs(self._model, ids, job.media))
        embedded = seen.pop("inputs_embeds", None)
        if embedded is None or embedded.shape[:2] != ids.shape:
            raise NotBatchable("its decoder does not take embeddings of these tokens")
        mask, added = seen.pop(MASK, None), seen.pop(ADDED, None) or []
        positions = _read_positions(seen.pop("position_ids", None))
        _check_arguments(seen)
        where = (embedded != embedding(ids)).any(-1)[0] if mask is None else mask[0].bool()
        rows = embedded[0][where].cpu()
        places = where.nonzero()[:, 0].tolist()
        highest = len(job.prompt_ids) - 1 if positions is None else int(positions.max())
        return PromptImages(
            places,
            rows,
            [layer.to(self._model.dtype).cpu() for layer in added],
            positions,
            highest + 1 - len(job.prompt_ids),
            _mark_rows(places, rows, positions),
        )

    def _run_to_decoder(self, ids: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the model calls its decoder with."""

        def stop_at_decoder(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            raise _Reached(args, kwargs)

        asked = self._model.prepare_inputs_for_generation(
            ids,
            attention_mask=torch.ones_like(ids),
            is_first_iteration=True,
            use_cache=False,
            **inputs,
        )
        hook = self._decoder.register_forward_pre_hook(
            stop_at_decoder, with_kwargs=True, prepend=True
        )
        try:
            self._model(**asked, return_dict=True)
        except _Reached as reached:
            if not reached.args:
                return reached.kwargs
        finally:
            hook.remove()
        raise NotBatchable("its decoder is not called by the names of its arguments")


class _Reached(Exception):
    """Raised in place of the decoder's call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, dict(kwargs)


def prepare_inputs(model: Any, ids: Tensor, images: Any) -> dict[str, Any]:
    """Return the model's arguments for a prompt, beside its `ids` [1, tokens].

    `images` are what the processor has made of the prompt's images: tensors by argument.
    """
    inputs = {name: _move(tensor, model) for name, tensor in (images or {}).items()}
    if "position_ids" in inspect.signature(model.forward).parameters:
        known = inputs | {"attention_mask": torch.ones_like(ids)}
        inputs["position_ids"] = model._prepare_position_ids_for_generation(ids, known)
    return inputs


def _move(value: Any, model: Any) -> Any:
    """Return a tensor on the model's device and, if of real numbers, in its dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


def _read_positions(given: Tensor | None) -> Tensor | None:
    """Return positions [parts, tokens] on the CPU; None if each token has its place's."""
    if given is None:
        return None
    if given.ndim == 3:
        parts = given[:, 0].cpu()
        return parts[1:] if len(parts) == 4 else parts  # the first of four are places, for masks
    if torch.equal(given[0].cpu(), torch.arange(given.shape[-1])):
        return None
    raise NotBatchable("its tokens have other positions than their places")


def _check_arguments(rest: Mapping[str, Any]) -> None:
    """Raise NotBatchable if the decoder takes more than embeddings and positions."""
    for name, value in rest.items():
        if name in _PLAIN or not isinstance(value, (Tensor, list, tuple, dict)):
            continue
        whole = isinstance(value, Tensor) and value.ndim == 2 and bool(value.all())
        if name != "attention_mask" or not whole:
            raise NotBatchable(f"its decoder takes {name} for images")


def _mark_rows(places: Sequence[int], rows: Tensor, positions: Tensor | None) -> list[int]:
    """Return a mark for each row, by the content of all rows that are adjacent to it."""
    marks: list[int] = []
    while len(marks) < len(places):
        start = stop = len(marks)
        while stop < len(places) and places[stop] - places[start] == stop - start:
            stop += 1
        content = hashlib.shake_128(_bytes_of(rows[start:stop]))
        if positions is not None:
            content.update(_bytes_of(positions[:, places[start] : places[start] + stop - start]))
        words = memoryview(content.digest(4 * (stop - start))).cast("I")
        marks += [word & _MASK30 for word in words]
    return marks


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
