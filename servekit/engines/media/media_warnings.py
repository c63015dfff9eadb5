"""The warning of a worker whose model cannot read images or recordings, and serves the rest."""

from __future__ import annotations

from typing import Any

import structlog

from servekit.protocol.types import Modality

log: Any = structlog.get_logger(__name__)


def warn_unavailable(model: str, reason: str, modality: Modality = "images") -> None:
    if modality == "images":
        log.warning("images_unavailable", model=model, reason=reason)
    else:
        log.warning("recordings_unavailable", model=model, reason=reason)
