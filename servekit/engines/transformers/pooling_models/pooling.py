"""Pooling of a model's hidden states to one vector per text, as the model's files specify.

An embedding model in the layout of sentence-transformers has a `modules.json` that lists the
modules after the transformer: a pooling (`1_Pooling/config.json`), possibly dense layers and a
normalisation. The formulas and the names in the files are those of sentence-transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from servekit.errors import LoadError

Layer = Callable[[Tensor], Tensor]
Mode = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pooling:
    """The modules that follow the transformer, and the length limit stated in their files."""

    modes: tuple[Mode, ...]
    layers: tuple[Layer, ...]
    max_tokens: int | None  # of one text

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of the texts, float32 [texts, size].

        `hidden` is [texts, tokens, width]; `mask` is [texts, tokens] with 1 for a token and 0 for
        the padding after it.
        """
        states, weights = hidden.float(), mask.unsqueeze(-1).float()
        vectors = torch.cat([mode(states, weights) for mode in self.modes], dim=-1)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors

    def tensors(self) -> list[Tensor]:
        """Return the weights of the dense layers."""
        dense = [layer for layer in self.layers if isinstance(layer, _Dense)]
        return [t for layer in dense for t in (layer.weight, layer.bias) if t is not None]


# ---------------------------------------------------------------- the formulas


def _pool_first(states: Tensor, mask: Tensor) -> Tensor:
    return states[:, 0]


def _pool_last(states: Tensor, mask: Tensor) -> Tensor:
    last = mask.squeeze(-1).sum(1).long() - 1
    return states[torch.arange(len(states), device=states.device), last]


def _pool_maximum(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask == 0, -torch.inf).amax(1)


def _pool_mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask).sum(1) / mask.sum(1)


def _mean_by_root(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask).sum(1) / mask.sum(1).sqrt()


def _weighted_mean(states: Tensor, mask: Tensor) -> Tensor:
    """Weight later tokens more: 1, 2, 3, …"""
    places = torch.arange(1, states.shape[1] + 1, device=states.device, dtype=states.dtype)
    return _pool_mean(states, mask * places[None, :, None])


#: Pooling modes in the order in which the results of several are concatenated.
_MODES: dict[str, tuple[str, Mode]] = {
    "cls": ("pooling_mode_cls_token", _pool_first),
    "max": ("pooling_mode_max_tokens", _pool_maximum),
    "mean": ("pooling_mode_mean_tokens", _pool_mean),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens", _mean_by_root),
    "weightedmean": ("pooling_mode_weightedmean_tokens", _weighted_mean),
    "lasttoken": ("pooling_mode_lasttoken", _pool_last),
}


# ---------------------------------------------------------------- reading the files


def read_pooling(folder: Path, device: torch.device) -> Pooling:
    """Read the pooling configuration. Raises LoadError if a part is missing or not supported."""
    try:
        return _read_modules(folder, device)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{folder} does not say how to make embeddings: {type(error).__name__}: {error}"
        ) from error


def _read_modules(folder: Path, device: torch.device) -> Pooling:
    modes: tuple[Mode, ...] = ()
    layers: list[Layer] = []
    for module in _read_json(folder / "modules.json"):
        kind, path = str(module["type"]).rpartition(".")[2], folder / module["path"]
        match kind:
            case "Transformer":
                if path != folder:
                    raise LoadError(f"{folder} keeps its transformer in {module['path']}.")
            case "Pooling":
                modes = _choose_modes(_read_json(path / "config.json"))
            case "Dense":
                layers.append(_read_dense(path, device))
            case "Normalize":
                layers.append(partial(nn.functional.normalize, dim=-1))
            case _:
                raise LoadError(f"Embeddings that go through a {kind} layer are not supported.")
    if not modes:
        raise LoadError(f"{folder} does not name a pooling in its modules.json.")
    return Pooling(modes, tuple(layers), _max_tokens(folder))


def _choose_modes(config: dict[str, Any]) -> tuple[Mode, ...]:
    """Return the modes named in `pooling_mode`, or in older files those switched on one by one."""
    named = config.get("pooling_mode")
    names: Sequence[str] = [named] if isinstance(named, str) else named or ()
    unknown = set(names) - set(_MODES)
    if unknown:
        raise LoadError(f"Pooling by {', '.join(sorted(unknown))} is not supported.")
    chosen = {name for name, (switch, _) in _MODES.items() if name in names or config.get(switch)}
    return tuple(mode for name, (_, mode) in _MODES.items() if name in chosen)


def _read_dense(path: Path, device: torch.device) -> Layer:
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise LoadError(f"{path} has no model.safetensors; a pickle of weights is not read.")
    tensors = {name: value.float().to(device) for name, value in load_file(weights).items()}
    name = _read_json(path / "config.json").get("activation_function", "torch.nn.Identity")
    return _Dense(tensors["linear.weight"], tensors.get("linear.bias"), find_activation(name))


@dataclass(frozen=True, slots=True)
class _Dense:
    """A dense layer: `weight` [out, in], `bias` [out]."""

    weight: Tensor
    bias: Tensor | None
    activation: Layer

    def __call__(self, vectors: Tensor) -> Tensor:
        return self.activation(nn.functional.linear(vectors, self.weight, self.bias))


def find_activation(name: str) -> Layer:
    """Return a torch class by its dotted name; nothing else is ever imported."""
    kind = getattr(nn, name.rpartition(".")[2], None)
    if name.startswith("torch.nn.") and isinstance(kind, type) and issubclass(kind, nn.Module):
        activation: Layer = kind()
        return activation
    raise LoadError(f"The activation function {name} is not supported.")


def _max_tokens(folder: Path) -> int | None:
    """Return the longest text that the model was made for; several file names are in use."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        stated = _read_json(path).get("max_seq_length")
        if isinstance(stated, int) and stated > 0:
            return stated
    return None


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())
