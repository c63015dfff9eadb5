"""Projectors: GGUF files by which llama.cpp reads images or recordings for a model (`mmproj`)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from servekit.errors import LoadError
from servekit.model_metadata.gguf import Header, read_header

#: The architecture that such files state.
ARCHITECTURE = "clip"
_NAME = re.compile(r"mmproj.*\.gguf", re.IGNORECASE)
#: Tokens that llama.cpp makes at most of an image, if its projector takes images of any size, and
#: patches of each. Source: tools/mtmd/clip.cpp, `set_limit_image_tokens`.
_MOST_TOKENS, _PATCHES = 4096, 4
#: Projectors whose images are cut to the stated size.
_FIXED = frozenset({"mlp", "ldp", "ldpv2", "gemma3", "idefics3", "internvl", "resampler"})
#: What each kind of encoder states of itself: tools/mtmd/clip.cpp, `load_hparams`.
_NUMBERS = (
    *("embedding_length", "feed_forward_length", "block_count", "projection_dim"),
    *("attention.head_count", "attention.layer_norm_epsilon"),
)
_COLOURS = ("image_mean", "image_std")
_NEEDED = {
    "vision": ("image_size", "patch_size", *_COLOURS),
    "audio": ("num_mel_bins",),
}
_TYPED = "|".join(map(re.escape, (*_NUMBERS, "image_size", "patch_size")))
_KEY = re.compile(
    rf"clip\.(?:vision|audio)\.({_TYPED})"
    r"|clip\.has_\w+_encoder"
)
#: Types of values by key, if not that of a whole number: llama.cpp reads no other. None: whether
#: there is an encoder.
_UINT32, _FLOAT32, _BOOL = 4, 6, 7
_TYPES: dict[str | None, int] = {"attention.layer_norm_epsilon": _FLOAT32, None: _BOOL}
#: Tensors without which the graph of a projector cannot be built.
_TENSORS = {
    **dict.fromkeys(("mlp", "idefics3", "gemma3", "pixtral"), ("v.patch_embd.weight",)),
    **dict.fromkeys(
        ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"),
        ("v.patch_embd.weight", "v.patch_embd.weight.1"),
    ),
    "qwen2a": (
        *("a.conv1d.1.weight", "a.conv1d.2.weight", "a.position_embd.weight"),
        *("a.post_ln.weight", "a.post_ln.bias"),
    ),
}
#: Those that put several patches into a token: how many along a side, if the file does not say.
_SCALES = {"idefics3": None, "gemma3": 4}
#: The tensor of a projector whose dimension is that of the embeddings: `clip_n_mmproj_embd`.
_OUTPUTS = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"), ("mm.2.bias", 0)),
    **dict.fromkeys(("mlp", "pixtral"), ("mm.2.weight", 1)),
    "gemma3": ("mm.input_projection.weight", 0),
    "idefics3": ("mm.model.fc.weight", 1),
    "qwen2a": ("mm.a.fc.weight", 1),
}
#: Tensors of a layer of an encoder.
_BLOCK = re.compile(r"([va])\.blk\.(\d+)\.((?:attn|ffn|ln)\w*\.(?:weight|bias))")
#: Frames of a recording's window, as Whisper has them; its encoder makes one position of two.
_AUDIO_FRAMES = 3000


def find_models(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder that are no projectors."""
    return [one for one in sorted(folder.glob("*.gguf")) if not _NAME.fullmatch(one.name)]


def find_projectors(model: Path) -> list[Path]:
    """Return the projectors beside a model's file, by their names."""
    try:
        return sorted(one for one in model.parent.iterdir() if _NAME.fullmatch(one.name))
    except OSError:
        return []


def find_beside(model: Path, header: Header) -> tuple[Path, Header] | None:
    """Return the projector beside a model's file, and its header; None if there is none.

    Raises LoadError for several ones, and for one that llama.cpp could not load for this model.
    """
    beside = find_projectors(model)
    if not beside:
        return None
    if len(beside) > 1:
        names = " and ".join(one.name for one in beside[:2])
        raise LoadError(f"{names} lie beside the model; options.mmproj says which is its own")
    found = read_header(beside[0])
    if why := find_fault(found, header):
        raise LoadError(f"{beside[0]} {why}")
    return beside[0], found


def find_fault(projector: Header, model: Header | None = None) -> str:
    """Return why llama.cpp could not load a projector, for this model; "" if nothing is known.

    It ends its process for some of these faults, as it takes tensors that are not there for parts
    that other projectors lack.
    """
    if projector.architecture != ARCHITECTURE:
        return f"is no projector: it is a model of the architecture {projector.architecture!r}"
    modalities = [one for one in _NEEDED if projector.metadata.get(f"clip.has_{one}_encoder")]
    for name, kind in projector.types.items():
        if (found := _KEY.fullmatch(name)) and kind != (due := _TYPES.get(found[1], _UINT32)):
            return f"is damaged: its {name} is of GGUF's type {kind} instead of {due}"
    if not modalities:
        return "reads neither images nor recordings, by what it says of itself"
    faults = (fault for one in modalities for fault in _find_faults(projector, one))
    return next(faults, "") or (_compare_widths(projector, model) if model is not None else "")


def _find_faults(projector: Header, modality: str) -> Iterator[str]:
    metadata = projector.metadata
    for key in (*_NUMBERS, *_NEEDED[modality]):
        name = f"clip.{modality}.{key}"
        value = metadata.get(name)
        if name not in metadata:
            yield f"is damaged: it has no {name}"
        elif key in _COLOURS and not (isinstance(value, list) and len(value) >= 3):
            yield f"is damaged: its {name} has to be three numbers"
        elif key not in _COLOURS and not (isinstance(value, int | float) and value > 0):
            yield f"is damaged: its {name} is {value!r}"
    kind = _name_kind(metadata, modality)
    if missing := [one for one in _TENSORS.get(kind, ()) if one not in projector.shapes]:
        yield f"is damaged: it has no tensor {missing[0]}"
    if kind in _TENSORS:  # others may be built otherwise
        yield from _compare_sizes(projector, modality)
        yield from _compare_blocks(projector, modality)
    scale = metadata.get(f"clip.{modality}.projector.scale_factor", _SCALES.get(kind))
    if kind in _SCALES and (not isinstance(scale, int) or not 0 < scale <= _side(metadata)):
        yield f"is damaged: its clip.{modality}.projector.scale_factor is {scale!r}"


def _compare_sizes(projector: Header, modality: str) -> Iterator[str]:
    """Yield sizes that do not go together."""
    keys = f"clip.{modality}."
    width, heads, patch = (
        projector.metadata.get(keys + key)
        for key in ("embedding_length", "attention.head_count", "patch_size")
    )
    if not isinstance(width, int) or not isinstance(heads, int) or width % heads:
        yield f"is damaged: its {keys}attention.head_count is {heads!r}, and its width {width!r}"
    shape = projector.shapes.get("v.patch_embd.weight", ())
    if modality == "vision" and shape[:2] != (patch, patch):
        yield f"is damaged: its {keys}patch_size is {patch!r}, and its tensor for patches {shape}"
    places = projector.shapes.get("a.position_embd.weight", ())
    if modality == "audio" and places[1:] < (_AUDIO_FRAMES // 2,):
        yield f"hears less than 30 s: its a.position_embd.weight is {places}"


def _compare_blocks(projector: Header, modality: str) -> Iterator[str]:
    """Yield what a layer lacks that another one has, and one that has another width."""
    letter, keys = modality[0], f"clip.{modality}."
    blocks: dict[int, set[str]] = defaultdict(set)
    width = projector.metadata[f"{keys}embedding_length"]
    for name, shape in projector.shapes.items():
        if (found := _BLOCK.fullmatch(name)) and found[1] == letter:
            blocks[int(found[2])].add(found[3])
            if found[3].startswith("ln1.") and shape != (width,):
                yield f"is damaged: {name} has {shape[0]} numbers, and its layers have {width}"
    if not blocks:
        return
    every = set().union(*blocks.values())
    for number in range(max(max(blocks) + 1, projector.metadata[f"{keys}block_count"])):
        if lacking := every - blocks.get(number, set()):
            yield f"is damaged: it has no tensor {letter}.blk.{number}.{min(lacking)}"


def _compare_widths(projector: Header, model: Header) -> str:
    """Return a sentence for embeddings of another width than the model's."""
    wanted = model.metadata.get(f"{model.architecture}.embedding_length")
    for modality in _NEEDED:
        name, axis = _OUTPUTS.get(_name_kind(projector.metadata, modality), ("", 0))
        shape = projector.shapes.get(name, ())
        if isinstance(wanted, int) and len(shape) > axis and shape[axis] != wanted:
            return (
                f"belongs to another model: it makes embeddings of {shape[axis]} numbers, and this"
                f" model's have {wanted}"
            )
    return ""


def _name_kind(metadata: dict[str, Any], modality: str) -> str:
    own = f"clip.{modality}.projector_type"
    return str(metadata.get("clip.projector_type") or metadata.get(own) or "")


def _side(metadata: dict[str, Any]) -> int:
    """Return the patches along a side of an image."""
    return int(metadata["clip.vision.image_size"] // metadata["clip.vision.patch_size"])


def estimate_bytes(header: Header, most_tokens: int | None = None) -> int:
    """Return the memory of a projector: its weights, and activations of its largest input.

    `most_tokens` limits an image, if its projector takes any size. As with flash attention; without
    it, attention alone may take a gigabyte for a large image.
    """

    def number(key: str) -> int:
        value = header.metadata.get(key)
        return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0

    patches = _PATCHES * (most_tokens or _MOST_TOKENS)
    kinds = ("vision", "audio")
    each = (_count_activations(kind, number, header.metadata, patches) for kind in kinds)
    return sum(header.sizes.values()) + max(each)


def _count_activations(
    kind: str, number: Callable[[str], int], metadata: dict[str, Any], patches: int
) -> int:
    """Return the bytes of activations in float32."""
    width, inner = (number(f"clip.{kind}.{key}_length") for key in ("embedding", "feed_forward"))
    positions = _AUDIO_FRAMES
    if kind == "vision":
        side = number("clip.vision.image_size") // max(1, number("clip.vision.patch_size"))
        named = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
        positions = side**2 if named in _FIXED else max(side**2, patches)
    return 4 * positions * (8 * width + 2 * inner)
