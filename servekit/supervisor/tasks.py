"""Waiting for the tasks that run lives."""

from __future__ import annotations

import asyncio

Tasks = set[asyncio.Task[None]]


async def ended(tasks: Tasks, within_s: float) -> set[str]:
    """Wait for lives to end; the names of those that did not. Raises what broke one off."""
    if not tasks:
        return set()
    done, pending = await asyncio.wait(tasks, timeout=within_s)
    for task in done:
        task.result()
    return {task.get_name() for task in pending}
