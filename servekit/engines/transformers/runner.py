"""Runners: the loop of the engine drives one, step by step, from the engine's thread only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.base import StepOutput
from servekit.engines.api.threaded_engine import StepRunner
from servekit.engines.transformers.lora.adapter import Adapter
from servekit.engines.transformers.lora.batched_lora import BatchedLora
from servekit.engines.transformers.request_row import Row


class Runner(StepRunner, Protocol):
    """A runner on a device; `capacity` is the number of tokens that one request can have."""

    capacity: int

    def make_pages(self) -> None:
        """Create an empty cache. Raises MemoryError, torch.OutOfMemoryError."""

    def drop_pages(self) -> None:
        """Free the cache and all other data of the last step."""

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors on the device that are not the model's own."""


class CausalRunner(ABC):
    """The base class of runners of a causal model, with its waiting rows and its adapters."""

    capacity: int

    def __init__(self, model: PreTrainedModel, mixing: BatchedLora | None = None) -> None:
        self.mixing = mixing or BatchedLora(model)
        self._waiting: deque[Row] = deque()

    @property
    @abstractmethod
    def running(self) -> int: ...

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    @abstractmethod
    def kv_used(self) -> float: ...

    def add(self, row: Row) -> None:
        self._waiting.append(row)

    def add_first(self, row: Row) -> None:
        self._waiting.appendleft(row)

    def _withdraw(self, row: Row) -> None:
        """Remove a row that waits."""
        self._waiting = deque(other for other in self._waiting if other is not row)

    @abstractmethod
    def cancel(self, row: Row) -> None: ...

    @abstractmethod
    def step(self) -> list[tuple[Row, StepOutput]]: ...

    def install_adapter(self, adapter: Adapter) -> None:
        """Allow rows with this adapter."""
        self.mixing.install_adapter(adapter)

    def list_recordings(self, adapter: Adapter) -> list[Callable[[], None]]:
        """Return what records the steps of an installed adapter, each to be run between steps."""
        return []

    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter that no row uses any more."""
        self.mixing.uninstall_adapter(adapter)

    def tensors(self) -> Iterable[Tensor]:
        """Return the adapters' tensors in the model."""
        return self.mixing.tensors()

    @abstractmethod
    def make_pages(self) -> None: ...

    @abstractmethod
    def drop_pages(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
