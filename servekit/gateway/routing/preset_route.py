"""A preset at this gateway: a model to clients, whose requests get what they leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from servekit.gateway.routing.model_queue import ModelQueue, NamedRoute
from servekit.protocol.messages import ChatMessage, Preset, SamplingParams
from servekit.protocol.tool_formats import THINKING_SWITCHES


class PresetRoute(NamedRoute):
    """The base's queue under the preset's name."""

    def __init__(self, base: ModelQueue, preset: Preset) -> None:
        super().__init__(base, replace(base.status, name=preset.name))
        self.preset = preset


def presets_of(route: ModelQueue) -> tuple[PresetRoute, ...]:
    """Return the routes of a model's presets."""
    return tuple(PresetRoute(route, preset) for preset in route.status.presets)


def complete_params(route: ModelQueue, params: SamplingParams) -> SamplingParams:
    """Return sampling parameters with those that a preset sets where they are None."""
    if not isinstance(route, PresetRoute):
        return params
    ours: dict[str, Any] = {
        name: value
        for name, value in route.preset.sampling.items()
        if getattr(params, name) is None
    }
    if "max_tokens" in ours:
        ours["clamp"] = True  # no client has asked for so many: it gets what fits
    return replace(params, **ours) if ours else params


def complete_chat(
    route: ModelQueue,
    messages: list[ChatMessage],
    template: dict[str, Any],
    template_defaults: dict[str, Any] | None = None,
) -> tuple[list[ChatMessage], dict[str, Any]]:
    """Return a chat's messages and template variables, with what a preset sets.

    The preset's variables go before `template_defaults`, the API's own, and the client's `template`
    before both. The preset's system message is for chats without one.
    """
    if not isinstance(route, PresetRoute):
        return messages, _merge_variables(template_defaults or {}, template)
    preset = route.preset
    if preset.system and not any(message.role == "system" for message in messages):
        messages = [ChatMessage("system", preset.system), *messages]
    return messages, _merge_variables(template_defaults or {}, preset.template, template)


def _merge_variables(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge variables of which the last ones win.

    A switch for thoughts replaces both of the earlier ones: templates read either name.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if any(name in layer for name in THINKING_SWITCHES):
            merged = {name: one for name, one in merged.items() if name not in THINKING_SWITCHES}
        merged.update(layer)
    return merged
