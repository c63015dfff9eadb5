"""The loaded adapters of a model, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import structlog

from servekit.errors import LoadError, RequestError
from servekit.protocol.adapters import AdapterInfo, AdapterSpec

log: Any = structlog.get_logger(__name__)

T = TypeVar("T")  # a loaded adapter, in the engine's own form


def load_adapters(
    load: Callable[[AdapterSpec], AdapterInfo], specs: Iterable[AdapterSpec]
) -> tuple[tuple[AdapterInfo, ...], dict[str, str]]:
    """Load all possible adapters; return their infos, and the reasons for refusals by name."""
    loaded, refused = [], {}
    for spec in specs:
        try:
            loaded.append(load(spec))
        except (RequestError, LoadError) as error:
            log.warning("adapter_refused", adapter=spec.name, reason=str(error))
            refused[spec.name] = error.message
    return tuple(loaded), refused


class AdapterTable(ABC, Generic[T]):
    """The loaded adapters; `load` and `unload` are called by one thread at a time."""

    def __init__(self) -> None:
        self._served: dict[str, T] = {}

    def get(self, name: str) -> T:
        """Return the adapter that a job names. Raises RequestError if it is not loaded."""
        found = self._served.get(name)
        if found is None:
            raise RequestError(f"This model has no adapter {name!r}.", param="model")
        return found

    def load_all(
        self, specs: Iterable[AdapterSpec]
    ) -> tuple[tuple[AdapterInfo, ...], dict[str, str]]:
        """Load all possible adapters; return their infos, and the reasons for refusals by name."""
        return load_adapters(self.load, specs)

    def load(self, spec: AdapterSpec) -> AdapterInfo:
        """Load and verify an adapter, as `Engine.load_adapter`."""
        if spec.name in self._served:
            raise RequestError(
                f"An adapter {spec.name!r} is loaded already; unload it first.", param="lora_name"
            )
        try:
            return self._load_new(spec)
        except LoadError as error:
            if not error.permanent:
                raise
            raise RequestError(error.message, param="lora_path") from error

    @abstractmethod
    def _load_new(self, spec: AdapterSpec) -> AdapterInfo:
        """Load an adapter of a new name; on an exception nothing of it remains."""
