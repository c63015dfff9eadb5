"""Images of many requests in one forward pass of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from servekit.engines.transformers.vision.image_reader import ADDED, MASK, PromptImages


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A request in a step: `past` of its tokens are in the cache, `count` are new."""

    images: PromptImages | None
    past: int
    count: int


@dataclass(slots=True)
class _Step:
    """The images of one packed batch, on the device; `places` count in the batch.

    `positions` are those of whole requests, [parts, tokens], with the place of the first token.
    """

    places: Tensor
    rows: Tensor
    added: list[Tensor]
    positions: list[tuple[int, Tensor]] = field(default_factory=list)


class BatchedImages:
    """Installer of images into the batches of a model and of its adapters; used between steps."""

    def __init__(self, model: Any) -> None:
        self._device = model.device
        self._step: _Step | None = None
        self.attach(model)

    def attach(self, model: Any) -> None:
        """Install images into the batches that this model runs, too: an adapter's own."""
        model.get_input_embeddings().register_forward_hook(self._put_rows)
        # Before the hook that sends the arguments to other ranks.
        model.get_decoder().register_forward_pre_hook(
            self._put_arguments, with_kwargs=True, prepend=True
        )

    def lay_out(self, parts: Sequence[ImagePart]) -> None:
        """Set the layout of the next forward pass, in the batch's order."""
        self._step = None
        places: list[int] = []
        pieces: list[tuple[Tensor, ...]] = []
        positions = []
        start = 0
        for part in parts:
            if (images := part.images) is not None:
                span = images.find_span(part.past, part.count)
                places += [start + place - part.past for place in images.places[span]]
                pieces.append(tuple(rows[span] for rows in (images.rows, *images.added)))
                if images.positions is not None:
                    block = images.positions_of(part.past, part.count)
                    positions.append((start, block.to(self._device)))
            start += part.count
        if not pieces:
            return
        rows, *added = (torch.cat(layer).to(self._device) for layer in zip(*pieces, strict=True))
        where = torch.tensor(places, dtype=torch.int64, device=self._device)
        self._step = _Step(where, rows, added, positions)

    @property
    def laid_out(self) -> bool:
        """Return whether the next forward pass has images."""
        return self._step is not None

    def clear_layout(self) -> None:
        """Forget the last layout: the next forward pass has no images."""
        self._step = None

    def _put_rows(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Put the embeddings of images in their places."""
        step = self._step
        if step is not None and len(step.places):
            out.view(-1, out.shape[-1]).index_copy_(0, step.places, step.rows)
        return out

    def _put_arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Put the positions of requests with images, and what is added to them, in their places."""
        step = self._step
        if step is None:
            return None
        if step.positions:
            plain: Tensor = kwargs["position_ids"]  # [1, tokens]
            parts = plain.repeat(len(step.positions[0][1]), 1)
            for start, block in step.positions:
                parts[:, start : start + block.shape[1]] = block
            kwargs["position_ids"] = parts[:, None]
        if step.added and len(step.places):
            tokens = kwargs["inputs_embeds"].shape[1]
            mask = torch.zeros(1, tokens, dtype=torch.bool, device=self._device)
            mask[0, step.places] = True
            kwargs |= {MASK: mask, ADDED: step.added}
        return args, kwargs
