"""CUDA graphs of steps: recorded when first needed, replayed ever after.

A step of a small model is a thousand kernels of a few microseconds each; started one by one from
Python they take many times that. A graph starts them all in one call. A step whose recording fails
is run as it is, from then on, and why is told once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Graphs:
    """Graphs by key. Where `wanted` is false, there are none and work is just done."""

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self._device = device
        self.on = wanted and device.type == "cuda"
        self.failure = ""
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None

    def run(self, key: Hashable, work: Callable[[], None], changed: Tensor) -> None:
        """Do `work`, which depends on nothing but `key` and on tensors that stay in place.

        Doing it twice has to be like doing it once, but for `changed`, which is put back between.
        """
        if not self.on:
            work()
            return
        if key not in self._graphs:
            self._graphs[key] = self._recorded(work, changed)
        graph = self._graphs[key]
        if graph is None:
            work()
        else:
            graph.replay()

    def _recorded(self, work: Callable[[], None], changed: Tensor) -> Any:
        """The graph; None where there can be none."""
        try:
            return self._record(work, changed)
        except Exception as error:  # a model may do anything; it has to be served all the same
            first = next(iter(str(error).splitlines()), "")
            self.failure = f"{type(error).__name__}: {first}"
            log.warning("a step cannot be recorded as a CUDA graph: %s", self.failure)
            torch.cuda.synchronize(self._device)
            return None

    def _record(self, work: Callable[[], None], changed: Tensor) -> Any:
        kept = changed.clone()
        try:
            self._rehearse(work)  # kernels compile and libraries take workspaces, outside the graph
        finally:
            changed.copy_(kept)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads may be at the GPU meanwhile: an adapter that is being loaded
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph

    def _rehearse(self, work: Callable[[], None]) -> None:
        cuda: Any = torch.cuda  # untyped in part
        current, side = cuda.current_stream(), cuda.Stream(self._device)
        side.wait_stream(current)
        with cuda.stream(side):
            work()
        current.wait_stream(side)
