"""CUDA graphs of steps, recorded before the first request or at first use, and then replayed.

A step of a small model is a thousand kernels of a few microseconds each; starting them one by one
from Python takes many times as long. A graph starts all of them in one call. A step that cannot be
recorded runs without a graph from then on, and the reason is logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import structlog
import torch
from torch import Tensor

from servekit.errors import describe_error

log: Any = structlog.get_logger(__name__)


class Graphs:
    """CUDA graphs by generation and key; without `wanted`, work runs directly."""

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self._device = device
        self.on = wanted and device.type == "cuda"
        self.failure = ""
        self._graphs: dict[tuple[int, Hashable], Any] = {}
        self._pool: Any = None
        self._side: Any = None

    def run_graph(
        self,
        key: Hashable,
        work: Callable[[], None],
        changed: Tensor,
        *,
        rehearsed: bool = False,
        generation: int = 0,
    ) -> None:
        """Run `work`, which depends only on `key` and on tensors at fixed addresses.

        Running it twice must equal running it once, except for `changed`, which is restored
        between. With `rehearsed` it has run before, and is recorded without another run. The fixed
        addresses of a generation other than 0 may be given up: see `keep_generation`.
        """
        if not self.on:
            work()
            return
        self.prepare_graph(key, work, changed, rehearsed=rehearsed, generation=generation)
        graph = self._graphs[generation, key]
        if graph is None:
            work()
        else:
            graph.replay()

    def prepare_graph(
        self,
        key: Hashable,
        work: Callable[[], None],
        changed: Tensor,
        *,
        rehearsed: bool = False,
        generation: int = 0,
    ) -> None:
        """Record a graph as `run_graph` does, if there is none, without replaying it."""
        if self.on and (generation, key) not in self._graphs:
            self._graphs[generation, key] = self._try_record(work, changed, rehearsed)

    def keep_generation(self, generation: int) -> None:
        """Drop the graphs of other generations, except for 0."""
        kept = {key: graph for key, graph in self._graphs.items() if key[0] in (0, generation)}
        if len(kept) < len(self._graphs):
            torch.cuda.synchronize(self._device)  # one may be running
            self._graphs = kept

    def _try_record(self, work: Callable[[], None], changed: Tensor, rehearsed: bool) -> Any:
        """Return the graph, or None if recording fails."""
        try:
            if not rehearsed:
                self._rehearse_work(work, changed)
            return self._record_graph(work)
        except Exception as error:  # any failure of a model: it is served without a graph
            self.failure = describe_error(error)
            log.warning("cuda_graph_failed", reason=self.failure)
            torch.cuda.synchronize(self._device)
            return None

    def _record_graph(self, work: Callable[[], None]) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, for example to load an adapter.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph

    def _rehearse_work(self, work: Callable[[], None], changed: Tensor) -> None:
        """Run `work`, which compiles kernels, outside the graph."""
        cuda: Any = torch.cuda  # untyped in part
        if self._side is None:  # one for all: each stream has a workspace and memory of its own
            self._side = cuda.Stream(self._device)
        current, kept = cuda.current_stream(), changed.clone()
        self._side.wait_stream(current)
        try:
            with cuda.stream(self._side):
                work()
        finally:
            current.wait_stream(self._side)
            changed.copy_(kept)
