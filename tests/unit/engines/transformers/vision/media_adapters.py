"""Adapters for models that see or hear, and what plain PEFT says with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from servekit.engines.transformers.lora import boft
from servekit.protocol.messages import ChatMessage
from tests.unit.engines.harness import Seeing
from tests.unit.engines.seeing_model import LIBRARY
from tests.unit.engines.transformers.lora import making
from tests.unit.engines.transformers.vision.pictures import Reference

#: Parts of the names of modules that are before the decoder.
MEDIA_PARTS = ("vision", "visual", "connector", "projector", "audio_tower")
TOKENS = Seeing.TOKENS
#: Adapters by name: how the engine runs them, and which modules of the model they change.
MODES = {"tongue": "mixed", "all": "mixed", "eyes": "mixed", "dora": "merged", "ia3": "grouped"}


class AdapterFolders(dict[str, Path]):
    """A model in `folder`, and adapters for it by name, written when they are first asked for."""

    def __init__(self, folder: Path, root: Path) -> None:
        super().__init__()
        self.folder, self._root = folder, root
        self.reference = Reference(folder)
        self._answers: dict[Any, list[int]] = {}

    def __missing__(self, name: str) -> Path:
        torch.manual_seed(sorted(MODES).index(name))
        boft.use_torch()
        made: Any = peft.get_peft_model(self.load(), self._configure(name))
        for parameter in made.parameters():
            if parameter.requires_grad and name == "ia3":
                parameter.data += 0.5 * torch.randn_like(parameter)
        made.save_pretrained(str(self._root / name))
        self[name] = self._root / name
        return self[name]

    def load(self) -> Any:
        kind = LIBRARY.AutoModelForMultimodalLM
        return kind.from_pretrained(self.folder, dtype=torch.float32).eval()

    def _configure(self, name: str) -> Any:
        linear = [name for name, one in self.load().named_modules() if _is_linear(name, one)]
        eyes = [name for name in linear if any(part in name for part in MEDIA_PARTS)]
        tongue = [name for name in linear if name not in eyes and "_proj" in name]
        plain: dict[str, Any] = {"init_lora_weights": False, "task_type": making.TASK}
        match name:
            case "tongue":
                return peft.LoraConfig(r=4, target_modules=tongue, **plain)
            case "all":
                return peft.LoraConfig(r=3, target_modules=eyes + tongue, **plain)
            case "eyes":
                return peft.LoraConfig(r=4, lora_alpha=32, target_modules=eyes, **plain)
            case "dora":
                both = eyes + tongue
                return peft.LoraConfig(r=4, use_dora=True, target_modules=both, **plain)
        return peft.IA3Config(
            target_modules=eyes + tongue, feedforward_modules=[], task_type=making.TASK
        )

    def due(self, name: str, messages: list[ChatMessage], tokens: int = TOKENS) -> list[int]:
        """What PEFT and the library say with an adapter, or with none, greedily in float32."""
        key = (name, tuple(messages), tokens)
        if key not in self._answers:
            plain = self.reference.model
            if name:
                self.reference.model = peft.PeftModel.from_pretrained(self.load(), self[name])
                self.reference.model.eval()
            try:
                self._answers[key] = self.reference.generate(messages, tokens)[1]
            finally:
                self.reference.model = plain
        return self._answers[key]


def _is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name
