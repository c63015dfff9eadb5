"""A rank other than 0: runs the commands of rank 0 until rank 0 is gone.

Begin      join the group, load the shards
Run        one forward pass of the model or of a part of it; an error in it ends the process, and so
           the replica: the ranks would no longer be in step
others     answered by Done or Failed
"""

from __future__ import annotations

import gc
import socket
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from servekit.engines.transformers import weights
from servekit.engines.transformers.batching import batch_processor
from servekit.engines.transformers.sleep import device_memory, weight_offload
from servekit.engines.transformers.tensor_parallel import (
    messages,
    plan,
    process_group,
    tensor_transfer,
)
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

#: Names of a running request's cache in a model's arguments and outputs: from 5.24 on, before.
_PAST = ("cache", "past_key_values")


class Follower:
    """A rank's part of the model and of the KV cache."""

    def __init__(self, channel: socket.socket, rank: int, size: int) -> None:
        self._channel = channel
        self._rank = rank
        self._size = size
        self._device = torch.device("cpu")
        self._model: Any = None
        self._parts: dict[messages.Runs, Any] = {}  # by which rank 0 names what to run
        self._attention = ""  # the library's name of its implementation
        self._spec: WorkerSpec
        self._store: weight_offload.WeightStore
        self._processor: Any = None
        self._past: Any = None  # cache of the running request, if requests run one at a time

    def live(self) -> None:
        """Carry out commands until rank 0 is gone."""
        while (order := messages.receive_order(self._channel)) is not None:
            if isinstance(order, messages.Run):
                self._run_forward(order)
            else:
                messages.send_message(self._channel, self._answer_order(order))

    def _answer_order(self, order: messages.ToRank) -> messages.FromRank:
        try:
            self._carry_out(order)
        except Exception as error:
            if self._model is None and not dist.is_initialized():
                raise  # the other ranks wait, and only this rank's death tells them
            traceback.print_exception(error)
            scarce = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            permanent = isinstance(error, LoadError) and error.permanent
            return messages.Failed(f"rank {self._rank}: {error}", scarce, permanent)
        return messages.Done(device_memory.available_bytes(self._spec, self._device))

    def _carry_out(self, order: messages.ToRank) -> None:
        match order:
            case messages.Begin():
                self._begin_load(order)
            case messages.MakePages():
                self._make_pages(order)
            case messages.DropPages():
                self._drop_pages()
            case messages.FallAsleep():
                self._drop_pages()
                self._store.sleep()
            case messages.WakeUp():
                self._store.wake()

    def _begin_load(self, order: messages.Begin) -> None:
        torch.set_num_threads(order.threads)
        self._device = process_group.device_of(order.spec, self._rank)
        self._spec = order.spec
        process_group.join_group(self._device, self._rank, self._size, order.store)
        self._model = weights.load_model(
            Path(order.folder),
            order.spec,
            order.spec.options.get("attention"),
            lambda progress: None,
            kind=order.kind,
            device=self._device,
        )
        self._parts = {"model": self._model}
        if order.kind == "see":
            self._parts |= plan.shared_parts(self._model)
        self._attention = str(self._model.config._attn_implementation)
        self._store = weight_offload.weight_store(self._model, self._device)

    def _make_pages(self, order: messages.MakePages) -> None:
        self._drop_pages()
        self._model.set_attn_implementation(self._attention)
        manager = batch_processor.make_manager(self._model, order.plan, ranks=self._size)
        self._model.set_attn_implementation(order.attention)
        self._processor = batch_processor.create_processor(manager)

    def _drop_pages(self) -> None:
        self._processor = self._past = None
        gc.collect()

    @torch.no_grad()
    def _run_forward(self, order: messages.Run) -> None:
        whole = torch.empty(order.size_bytes, dtype=torch.uint8, device=self._device)
        tensors = tensor_transfer.split_tensors(
            process_group.broadcast_tensor(whole), order.tensors
        )
        pages = None if self._processor is None else self._processor.cache
        args, kwargs = tensor_transfer.unpack_value(order.arguments, tensors, self._past, pages)
        module = self._parts[order.what]
        if order.attention and str(module.config._attn_implementation) != order.attention:
            self._model.set_attn_implementation(order.attention)
        keeps = bool(kwargs.get("use_cache"))
        if keeps and all(kwargs.get(name) is None for name in _PAST):
            self._past = None  # of an earlier request, whose memory this one may need
        outputs = module(*args, **kwargs)
        if keeps:
            self._past = next(outputs[name] for name in _PAST if name in outputs)
