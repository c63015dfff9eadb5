"""The presets of a model for the gateways, made from the configuration."""

from __future__ import annotations

from servekit.config.schema import ModelConfig
from servekit.protocol.messages import Preset
from servekit.protocol.tool_formats import THINKING_SWITCHES


def list_presets(model: ModelConfig) -> tuple[Preset, ...]:
    """Return the presets that the configuration names."""
    return tuple(
        Preset(
            name=one.name,
            sampling=one.sampling.model_dump(exclude_none=True),
            system=one.system or "",
            template={
                **({} if one.thinking is None else dict.fromkeys(THINKING_SWITCHES, one.thinking)),
                **one.template,
            },
        )
        for one in model.presets
    )
