"""PEFT's own layers on a skeleton, and their weights, checked against each other by shape.

PEFT builds the layers from the configuration. The shapes that they expect are compared with the
file's header before any weight is read, so an adapter of another base is refused with the name of
the layer that differs. Weights are then read directly onto the worker's device.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from servekit.engines.transformers.lora import boft
from servekit.engines.transformers.lora.adapter_files import PARAM, WEIGHTS, AdapterFiles
from servekit.engines.transformers.lora.module_clone import BaseChanged, ModuleClones
from servekit.errors import LoadError, RequestError

#: PEFT's name for the single adapter in each of its models.
NAME = "default"
_PREFIX = "base_model.model."


def build_peft_model(files: AdapterFiles, skeletons: ModuleClones, base: str) -> tuple[Any, str]:
    """Return a PeftModel over a skeleton with its weights, and its kind ("LORA", "DORA", …).

    `base` is the model's display name. Raises RequestError if the adapter does not fit, LoadError
    if memory does not suffice.
    """
    with explain_errors(base), offline():
        model, kind = _build_layers(files, skeletons)
    _require_fit(files, model, base)
    with explain_errors(base), offline():
        _load_weights(files, model, skeletons)
    device = next(skeletons.base.parameters()).device
    _bring_constants(model, device)
    _require_device(model, device)
    model.requires_grad_(False)
    return model.eval(), kind


def _build_layers(files: AdapterFiles, skeletons: ModuleClones) -> tuple[Any, str]:
    import peft
    from peft import PeftConfig, PeftModelForCausalLM

    kind = str(files.config["peft_type"])
    if kind not in peft.PEFT_TYPE_TO_CONFIG_MAPPING:
        raise RequestError(f"peft {peft.__version__} has no tuner {kind}.", param=PARAM)
    config: Any = PeftConfig.from_pretrained(str(files.folder))
    config.inference_mode = True
    if kind == "BOFT":
        boft.use_torch()
    # Low-rank factors are multiplied with activations in the model's dtype. Other tuners invert and
    # solve in float32 for any model dtype, as is PEFT's default.
    model = PeftModelForCausalLM(
        skeletons.new(), config, NAME, autocast_adapter_dtype=kind != "LORA"
    )
    return model, "DORA" if getattr(config, "use_dora", False) else kind


def _require_fit(files: AdapterFiles, model: Any, base: str) -> None:
    """Compare the file's header with the shapes that the layers expect."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    # An adapter's file may also contain some of the base's tensors, such as embeddings.
    known = dict(model.named_parameters(remove_duplicate=False)) | state
    for name, shape in files.shapes.items():
        wanted = known.get(name)
        if wanted is None:
            _refuse_adapter(files, f"changes {_plain_name(name)}, which {base} does not have")
        elif tuple(wanted.shape) != shape:
            needed = f"where {base} needs {list(wanted.shape)}"
            _refuse_adapter(files, f"has {list(shape)} for {_plain_name(name)}, {needed}")
    missing = [name for name in state if name not in files.shapes]
    if missing:
        _refuse_adapter(
            files, f"lacks {_plain_name(missing[0])}, and {len(missing)} tensors in all"
        )


def _refuse_adapter(files: AdapterFiles, what: str) -> NoReturn:
    made_for = files.config.get("base_model_name_or_path") or "a model that it does not name"
    raise RequestError(
        f"The adapter does not fit: it {what}. It was made for {made_for}.", param=PARAM
    )


def _plain_name(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _load_weights(files: AdapterFiles, model: Any, skeletons: ModuleClones) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    _give_own_memory(model, files.shapes, skeletons)
    device = next(skeletons.base.parameters()).device
    state = load_file(files.folder / WEIGHTS, device=str(device))
    set_peft_model_state_dict(model, state, NAME)


def _give_own_memory(model: Any, names: Container[str], skeletons: ModuleClones) -> None:
    """Give parameters that the file holds their own memory, so that the base is not overwritten."""
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in names and skeletons.shares_memory(parameter):
            owner, _, leaf = name.rpartition(".")
            fresh = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, fresh)


def _bring_constants(model: Any, device: torch.device) -> None:
    """Move buffers to the weights' device: BOFT creates permutations on the CPU."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _require_device(model: Any, device: torch.device) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.device != device:
            raise RequestError(
                f"{_plain_name(name)} of the adapter is on {tensor.device}, not on {device}.",
                param=PARAM,
            )


@contextmanager
def offline() -> Iterator[None]:
    """Make the hub's library refuse to fetch: an adapter is built only from its own files."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def explain_errors(base: str) -> Iterator[None]:
    """Turn errors of PEFT and torch, of many kinds, into a sentence."""
    try:
        yield
    except (RequestError, LoadError, BaseChanged):
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise LoadError(f"There is no memory for the adapter: {error}", permanent=False) from error
    except Exception as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise RequestError(
            f"The adapter cannot be built on {base}: {type(error).__name__}: {text}.", param=PARAM
        ) from error
