"""Adapters of many requests in one forward pass of the base model.

A step's tokens are packed request after request, with those of one adapter adjacent. For each
linear layer that any adapter changes, `down` and `up` of all adapters are stacked: [ranks, in] and
[ranks, out]. A layer adds to its output

- run by run, `x @ down.T @ up` of one adapter's tokens at a time: least arithmetic, two kernels per
  adapter;
- or stacked, one product for all tokens and ranks, with the entries zeroed whose adapter is not the
  token's: three kernels for any number of adapters, and more arithmetic. The entries are
  overwritten instead of multiplied by zero, because another adapter's product may be NaN.

The faster way depends on tokens, ranks and device. A step without adapters returns the output of
the layer's own forward unchanged.

A decode step on a GPU has one token in each slot, in any order, and is a CUDA graph that is
replayed for other adapters: there `lora_triton` adds each token's own product, from the addresses
in a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from servekit.engines.transformers.lora.adapter import Adapter, Factors
from servekit.engines.transformers.lora.address_table import AddressTable, Stack
from servekit.errors import describe_error

log: Any = structlog.get_logger(__name__)

#: Multiplications that a device does in the time of one more run: the stacked way is faster as long
#: as it wastes fewer. Measured on a CPU (7 µs per run with one thread) and an H100 (43 µs per run,
#: the host's time for three calls, at 100 T multiplications per second).
_LAUNCH_WORTH = {"cpu": 2.5e5, "cuda": 4.0e9}


@dataclass(frozen=True, slots=True)
class Part:
    """A request in a step: `past` of its tokens are in the cache, `count` are new."""

    adapter: Adapter | None
    past: int
    count: int


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The products of a step with the stacks of one key.

    `runs` are (first rank, end rank, first token, end token), ends excluded. `wasted` counts the
    products of a token and a rank that belong to different adapters.
    """

    runs: list[tuple[int, ...]]
    wasted: int


@dataclass(slots=True)
class BatchLayout:
    """The layout of one packed batch of `tokens`.

    `runs` are (uid, start, stop) of tokens with low-rank adapters; `prompts` are embedding rows of
    virtual tokens, with the place of the first.
    """

    tokens: int
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    prompts: list[tuple[int, Tensor]] = field(default_factory=list)
    _plans: dict[int, StackPlan] = field(default_factory=dict)
    _owners: Tensor | None = None
    _masks: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, parts: Sequence[Part]) -> BatchLayout | None:
        """Lay out a batch in its order; return None if nothing is to be added to the base."""
        step = cls(0)
        for part in parts:
            if part.adapter is not None and part.adapter.model is None:
                step._take_part(part, part.adapter)
            step.tokens += part.count
        return step if step.runs or step.prompts else None

    def _take_part(self, part: Part, adapter: Adapter) -> None:
        start, stop = self.tokens, self.tokens + part.count
        if adapter.prompt is not None:
            if part.past < adapter.virtual_tokens:
                self.prompts.append((start, adapter.prompt[part.past : part.past + part.count]))
        elif self.runs and self.runs[-1][0] == adapter.uid and self.runs[-1][2] == start:
            self.runs[-1] = (adapter.uid, self.runs[-1][1], stop)
        else:
            self.runs.append((adapter.uid, start, stop))

    def plan(self, stack: Stack) -> StackPlan:
        """Return which ranks meet which tokens; computed once per key of stacks."""
        found = self._plans.get(stack.key)
        if found is None:
            places = stack.places
            runs = [(*places[uid], *run) for uid, *run in self.runs if uid in places]
            needed = sum((stop - start) * (last - first) for first, last, start, stop in runs)
            found = StackPlan(runs, self.tokens * len(stack.owners) - needed)
            self._plans[stack.key] = found
        return found

    def other_ranks(self, stack: Stack, device: torch.device) -> Tensor:
        """Return where a token's adapter is not the rank's: bool [tokens, ranks]."""
        found = self._masks.get(stack.key)
        if found is None:
            ranks = torch.tensor(stack.owners, device=device)
            found = self._owners_of_tokens(device)[:, None] != ranks
            self._masks[stack.key] = found
        return found

    def _owners_of_tokens(self, device: torch.device) -> Tensor:
        if self._owners is None:
            owners = [-1] * self.tokens
            for uid, start, stop in self.runs:
                owners[start:stop] = [uid] * (stop - start)
            self._owners = torch.tensor(owners, device=device)
        return self._owners


class BatchedLora:
    """Installer of adapters into a running model; used only between steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._like = next(model.parameters())
        self.table = AddressTable(self._like.device)
        #: Whether decode steps can add factors; None: not looked yet. A CPU needs no kernels.
        self._has_kernels = True if self._like.device.type == "cpu" else None
        self._trees = [model]
        self._layers: dict[str, MixedLayer] = {}
        self._prompts = 0
        self._keys: dict[tuple[int, ...], int] = {}  # by owners, for the installed adapters
        self._next_key = count()
        self._embedding: _Wrapped | None = None
        self.step: BatchLayout | None = None
        #: In a decode step on a GPU: the number of each slot's adapter, int64 [slots].
        self.numbers: Tensor | None = None
        self._side: Any = None  # a stream

    def add_tree(self, tree: nn.Module) -> None:
        """Let adapters run in a second tree of the model's modules, too; none is installed yet.

        The trees run in turns, and each pass has its own layout.
        """
        self._trees.append(tree)

    def lay_out(self, parts: Sequence[Part]) -> None:
        """Set the layout of the next forward pass."""
        self.step, self.numbers = BatchLayout.build(parts), None

    def prepare_kernels(self) -> None:
        """Compile and check the kernels of decode steps, in any thread, before the first adapter.

        Without them adapters run in the library's steps.
        """
        if self._has_kernels is None:
            self._has_kernels = _check_kernels(self._like.device, self._like.dtype)

    def fits_slots(self, adapter: Adapter) -> bool:
        """Return whether rows with the adapter may share decode steps with all others."""
        return adapter.model is None and (bool(self._has_kernels) or not adapter.factors)

    @property
    def has_factors(self) -> bool:
        """Return whether any installed adapter has factors."""
        return bool(self._layers)

    def lay_out_slots(self, adapters: Sequence[Adapter | None], numbers: Tensor) -> int:
        """Set the layout of a decode step; return the generation of graphs that it needs.

        `adapters` are those of the first slots, and `numbers` [slots] has their numbers on the
        device, where the step reads them. Without adapters the generation is 0.
        """
        self.step = self.numbers = None
        if not any(one is not None and one.factors for one in adapters):
            return 0
        if numbers.device.type == "cpu":
            spare = [None] * (len(numbers) - len(adapters))
            # a row that decodes is past all virtual tokens
            self.lay_out([Part(one, sys.maxsize, 1) for one in (*adapters, *spare)])
            return 0
        self.table.send()
        self.numbers = numbers
        return self.table.generation

    @contextmanager
    def run_beside(self) -> Iterator[None]:
        """Let a graph that is being recorded run the kernels of the block beside those after it."""
        if not self._is_recording:
            yield
            return
        cuda: Any = torch.cuda  # untyped in part
        self._side = self._side or cuda.Stream(self._like.device)
        self._side.wait_stream(cuda.current_stream())
        with cuda.stream(self._side):
            yield

    def await_beside(self) -> None:
        """Let what follows wait for the kernels of the last `run_beside`."""
        if self._is_recording:
            torch.cuda.current_stream().wait_stream(self._side)

    @property
    def _is_recording(self) -> bool:
        return self._like.is_cuda and torch.cuda.is_current_stream_capturing()

    def clear_layout(self) -> None:
        """Forget the last layout, and free the table; the factors may move."""
        self.step = self.numbers = None
        self.table.drop()

    def lay_out_alone(self, part: Part) -> None:
        """Set the layout of a forward pass of one request.

        Its adapter gets all rows of each layer: those of a vision tower are patches, not tokens.
        """
        self.lay_out([part])
        if self.step is not None:
            self.step.runs = [(uid, 0, sys.maxsize) for uid, _, _ in self.step.runs]

    def install_adapter(self, adapter: Adapter) -> None:
        """Install an adapter; on an exception nothing of it remains."""
        try:
            if adapter.factors:
                adapter.number = self.table.take_number(adapter.uid)
            for name, factors in adapter.factors.items():
                self._mixed_layer(name).put(adapter.uid, factors)
            if adapter.prompt is not None:
                self._prompts += 1
                self._wrap_embedding()
        except BaseException:
            self.uninstall_adapter(adapter)
            raise

    def uninstall_adapter(self, adapter: Adapter) -> None:
        self.step = self.numbers = None
        for name in adapter.factors:
            layer = self._layers.get(name)
            if layer is not None and layer.remove_factors(adapter.uid):
                self._layers.pop(name).unwrap()
        self.table.free_number(adapter.uid)
        # uids are never reused, so their keys would stay for good
        self._keys = {who: key for who, key in self._keys.items() if adapter.uid not in who}
        if adapter.prompt is not None and self._prompts:
            self._prompts -= 1
            if not self._prompts and self._embedding is not None:
                self._embedding.unwrap()
                self._embedding = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the stacks of all layers."""
        for layer in self._layers.values():
            yield from layer.tensors()

    def stack(self, factors: dict[int, Factors]) -> Stack:
        """Stack the factors of a layer in new memory."""
        places: dict[int, tuple[int, int]] = {}
        owners: list[int] = []
        for uid, one in factors.items():
            places[uid] = (len(owners), len(owners) + len(one.down))
            owners += [uid] * len(one.down)
        who = tuple(owners)
        if who not in self._keys:
            self._keys[who] = next(self._next_key)
        down = torch.cat([one.down for one in factors.values()])
        up = torch.cat([one.up for one in factors.values()])
        return Stack(self._keys[who], who, places, down, up)

    def _mixed_layer(self, name: str) -> MixedLayer:
        if name not in self._layers:
            modules = [tree.get_submodule(name) for tree in self._trees]
            self._layers[name] = MixedLayer(self, name, modules)
        return self._layers[name]

    def _wrap_embedding(self) -> None:
        if self._embedding is None:
            inputs: Any = self._model
            self._embedding = _Wrapped(inputs.get_input_embeddings())
            self._embedding.wrap(self._embed_tokens)

    def _embed_tokens(self, plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the base's embedding, with the adapters' own rows for virtual tokens."""
        out = plain(*args, **kwargs)
        if self.step is not None:
            flat = out.view(-1, out.shape[-1])
            for start, rows in self.step.prompts:
                flat[start : start + len(rows)] = rows
        return out


class _Wrapped:
    """A module whose forward is temporarily replaced."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.plain: Callable[..., Tensor] = module.forward
        self._was = module.__dict__.get("forward")

    def wrap(self, forward: Callable[..., Tensor]) -> None:
        plain = self.plain
        self.module.forward = lambda *args, **kwargs: forward(plain, *args, **kwargs)

    def unwrap(self) -> None:
        del self.module.forward
        if self._was is not None:
            self.module.forward = self._was


class MixedLayer:
    """A linear layer of the base, in each tree of modules, with the factors of its adapters."""

    def __init__(self, mixing: BatchedLora, name: str, modules: Sequence[nn.Module]) -> None:
        self._mixing = mixing
        self._name = name
        self._factors: dict[int, Factors] = {}
        self._stack: Stack | None = None
        self._wrapped = [_Wrapped(module) for module in modules]
        for one in self._wrapped:
            one.wrap(self._forward_mixed)

    def put(self, uid: int, factors: Factors) -> None:
        self._restack_factors(self._factors | {uid: factors})

    def remove_factors(self, uid: int) -> bool:
        """Remove an adapter; return True if none is left."""
        self._restack_factors({other: f for other, f in self._factors.items() if other != uid})
        return not self._factors

    def tensors(self) -> Iterator[Tensor]:
        if self._stack is not None:
            yield from (self._stack.down, self._stack.up)

    def unwrap(self) -> None:
        for one in self._wrapped:
            one.unwrap()

    def _restack_factors(self, factors: dict[int, Factors]) -> None:
        """Copy all factors into one stack, and replace them by views of it to save memory."""
        self._stack = stack = self._mixing.stack(factors) if factors else None
        self._mixing.table.set_stack(self._name, stack)
        if stack is not None:
            factors = {
                uid: Factors(stack.down[a:b], stack.up[a:b]) for uid, (a, b) in stack.places.items()
            }
        self._factors = factors

    def _forward_mixed(
        self, plain: Callable[..., Tensor], x: Tensor, *args: Any, **kw: Any
    ) -> Tensor:
        mixing, stack = self._mixing, self._stack
        if stack is not None and mixing.numbers is not None:
            return self._forward_numbered(mixing.numbers, stack, partial(plain, x, *args, **kw), x)
        out = plain(x, *args, **kw)
        step = mixing.step
        if step is not None and step.runs and stack is not None:
            _add_products(step, stack, x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]))
        return out

    def _forward_numbered(
        self, numbers: Tensor, stack: Stack, plain: Callable[[], Tensor], x: Tensor
    ) -> Tensor:
        """Compute a layer of a decode step on a GPU."""
        from servekit.engines.transformers.lora import lora_triton

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if len(flat) != len(numbers):
            return plain()  # not a slot each: such an adapter fails its verification in the batch
        table, ranks = self._mixing.table.entries(self._name)
        entries = lora_triton.Entries(table, numbers, ranks, stack.down)
        hidden = lora_triton.make_hidden(flat, entries)
        with self._mixing.run_beside():
            lora_triton.shrink_states(flat, entries, hidden)
        out = plain()
        self._mixing.await_beside()
        lora_triton.add_expanded(hidden, entries, out.view(-1, out.shape[-1]))
        return out


def _check_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        from servekit.engines.transformers.lora.lora_triton import check_products

        check_products(device, dtype)
    except Exception as error:  # a compiler's error, no Triton: any failure excludes it
        log.info("adapter_kernels_failed", reason=describe_error(error))
        return False
    return True


def _add_products(step: BatchLayout, stack: Stack, x: Tensor, out: Tensor) -> None:
    """Add the adapters' products with `x` [tokens, in] to `out` [tokens, out] in place."""
    plan = step.plan(stack)
    if len(plan.runs) > 1 and _stacked_is_quicker(plan, x, out):
        hidden = x @ stack.down.T
        hidden.masked_fill_(step.other_ranks(stack, hidden.device), 0)
        out.addmm_(hidden, stack.up)
        return
    for first, last, start, stop in plan.runs:
        hidden = x[start:stop] @ stack.down[first:last].T
        out[start:stop].addmm_(hidden, stack.up[first:last])


def _stacked_is_quicker(plan: StackPlan, x: Tensor, out: Tensor) -> bool:
    worth = _LAUNCH_WORTH["cpu" if x.device.type == "cpu" else "cuda"]
    extra = plan.wasted * (x.shape[-1] + out.shape[-1])
    return extra < (len(plan.runs) - 1.5) * worth
