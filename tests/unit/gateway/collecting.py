"""Collects what a generation yields."""

from __future__ import annotations

from servekit.gateway.generation.generation import Choice, Generation


async def collect_choices(generation: Generation) -> list[Choice]:
    """Wait for all choices and return them."""
    choices = [Choice() for _ in range(generation.count)]
    async for chunks in generation:
        for chunk in chunks:
            choices[chunk.choice].add(chunk)
    return choices
