"""An import of fastapi that builds no validators for OpenAPI documents.

fastapi describes a document by some thirty pydantic models. Building their validators takes a third
of its import, and only a client that reads the document needs them.
"""

from __future__ import annotations

from typing import Any


def import_fastapi() -> None:
    """Import fastapi; pydantic builds the validators of its models where one is first used."""
    from pydantic import BaseModel

    rebuild = BaseModel.__dict__["model_rebuild"]

    def rebuild_if_used(cls: type[BaseModel], /, **how: Any) -> bool | None:
        """Rebuild for a first use, which says how, and not at the end of fastapi's module."""
        return rebuild.__func__(cls, **how) if how else None

    setattr(BaseModel, "model_rebuild", classmethod(rebuild_if_used))  # noqa: B010
    BaseModel.model_config["defer_build"] = True
    try:
        import fastapi  # noqa: F401
    finally:
        del BaseModel.model_config["defer_build"]
        setattr(BaseModel, "model_rebuild", rebuild)  # noqa: B010
