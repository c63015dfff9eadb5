"""Choice of how an adapter shares batches.

mixed     plain low-rank factors on linear layers, and virtual tokens before the prompt: each token
          gets the addition of its own adapter, so all adapters and the base share a step
merged    tuners whose layers cost more than the base's own: the weights are computed once, in
          copies, if there is memory for these
grouped   all others, and those without memory for copies: their own layers over the base's
          weights, in separate steps that take turns
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from servekit.engines.transformers.lora.adapter import Factors
from servekit.engines.transformers.lora.adapter_files import PARAM
from servekit.engines.transformers.lora.module_clone import ModuleClones
from servekit.engines.transformers.lora.peft_model import NAME
from servekit.errors import RequestError
from servekit.protocol.adapters import AdapterMode
from servekit.system import cgroup
from servekit.units import format_bytes

#: Tuners that compute a whole weight, or invert a matrix, in each layer and step.
COSTLY = {
    *("DORA", "BOFT", "OFT", "LOHA", "LOKR", "HRA", "HIRA", "FOURIERFT", "WAVEFT", "RANDLORA"),
    *("VBLORA", "C3A", "DELORA", "SHIRA", "PSOFT", "GRALORA", "TINYLORA", "UNILORA", "ADALORA"),
}
#: Tuners that consist of virtual tokens only.
PROMPTS = {"PROMPT_TUNING", "P_TUNING", "CPT"}
#: Share of free memory that copies for merging may take.
MERGE_FRACTION = 0.5


@dataclass(frozen=True, slots=True)
class BatchingChoice:
    mode: AdapterMode
    why: str  # a sentence


def choose_mode(kind: str, model: Any, skeletons: ModuleClones) -> BatchingChoice:
    """Choose the mode for a PeftModel of this kind, whose weights are loaded."""
    if kind in PROMPTS:
        return BatchingChoice(
            "mixed", "Its virtual tokens stand before the prompt as tokens of its own."
        )
    obstacle = _explain_unmixable(kind, model, skeletons)
    if not obstacle:
        return BatchingChoice(
            "mixed", "Low-rank factors are added token by token, beside all others."
        )
    if kind not in COSTLY:
        return BatchingChoice("grouped", f"{obstacle}, and its own layers are cheap to run.")
    needed, free = copied_bytes(model), _free_bytes(skeletons)
    if needed > free * MERGE_FRACTION:
        return BatchingChoice(
            "grouped",
            f"{obstacle}, and merging needs {format_bytes(needed)} for copies of the weights "
            f"where {format_bytes(free)} are free.",
        )
    return BatchingChoice(
        "merged",
        f"{obstacle}, and its own layers are costly: it is merged into copies of the weights that "
        f"it changes, {format_bytes(needed)}.",
    )


def factors_of(model: Any) -> dict[str, Factors]:
    """Return the low-rank factors of a plain LoRA, by module name of the base.

    Raises RequestError if a factor is not finite: in a batch it would affect every request.
    """
    found = {}
    for name, layer in tuner_layers(model):
        up = layer.lora_B[NAME].weight.detach()
        scaled = (up.float() * layer.scaling[NAME]).to(up.dtype)
        down = layer.lora_A[NAME].weight.detach()
        if not (torch.isfinite(scaled).all() and torch.isfinite(down).all()):
            dtype = str(up.dtype).removeprefix("torch.")
            raise RequestError(
                f"The factors of layer {name} are beyond the range of {dtype}, the model's own "
                "type. Serve the model in bfloat16, or save the adapter with a smaller scaling.",
                param=PARAM,
            )
        found[name] = Factors(down, scaled.T.contiguous())
    return found


def tuner_layers(model: Any) -> list[tuple[str, Any]]:
    """Return PEFT's layers in a PeftModel, by the names of their modules in the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    named = model.get_base_model().named_modules()
    return [(name, module) for name, module in named if isinstance(module, BaseTunerLayer)]


def copied_bytes(model: Any) -> int:
    """Return the size of copies of all weights that the tuner changes."""
    bases = (layer.get_base_layer() for _, layer in tuner_layers(model))
    return sum(p.numel() * p.element_size() for base in bases for p in base.parameters())


def _explain_unmixable(kind: str, model: Any, skeletons: ModuleClones) -> str:
    """Return why tokens of this adapter cannot share a step with others, or ""."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    if kind != "LORA":
        return f"{kind} does more to a layer than to add low-rank factors to it"
    inner = model.get_base_model()
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in inner.modules()):
        return "It replaces whole modules of the base"
    if _changes_the_base(inner, skeletons):
        return "It contains changed weights of the base"
    layers = tuner_layers(model)
    head = inner.get_output_embeddings()
    odd = next((n for n, layer in layers if not _is_plain(layer) or layer.base_layer is head), "")
    return f"Its layer {odd} is more than low-rank factors on a linear layer" if odd else ""


def _is_plain(layer: Any) -> bool:
    from peft.tuners.lora.layer import Linear
    from transformers.pytorch_utils import Conv1D

    bare = type(layer) is Linear and isinstance(layer.base_layer, (nn.Linear, Conv1D))
    return bare and not layer.lora_variant and not layer.lora_bias[NAME]


def _changes_the_base(inner: nn.Module, skeletons: ModuleClones) -> bool:
    marks = ("lora_", f".{NAME}")
    return any(
        not skeletons.shares_memory(tensor) and not any(mark in name for mark in marks)
        for name, tensor in inner.named_parameters()
    )


def _free_bytes(skeletons: ModuleClones) -> int:
    device = next(skeletons.base.parameters()).device
    if device.type != "cuda":
        return cgroup.available_memory_bytes()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


@torch.no_grad()
def merge_adapter(model: Any) -> Any:
    """Merge a PeftModel into copies of the weights that it changes; return the bare model."""
    for _, layer in tuner_layers(model):
        base = layer.get_base_layer()
        for name, parameter in list(base.named_parameters(recurse=False)):
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            setattr(base, name, copied)
    merged = model.merge_and_unload()
    merged.requires_grad_(False)
    return merged.eval()
