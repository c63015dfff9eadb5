"""Adapters of many requests in one forward pass of the base model.

A step's tokens are packed, request after request, those of one adapter side by side. To each linear
layer that some adapter changes, `down` and `up` of all of them are stacked: [ranks, in] and
[ranks, out]. A layer adds to its output

- run by run, `x @ down.T @ up` of one adapter's tokens at a time: least arithmetic, two kernels for
  each adapter;
- or stacked, at one go for all tokens and ranks, with those products zeroed whose adapter is not
  the token's: three kernels for any number of adapters, and more arithmetic. They are overwritten,
  not multiplied by zero: a product of another adapter's may be no number.

Which is quicker is a matter of tokens, ranks, and the device. A step without adapters calls the
layer's own forward and returns what it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from servekit.engines.transformers.lora.adapter import Adapter, Factors

#: Multiplications that a device does in the time that it takes to add one more run: with more than
#: that to spare, run by run is quicker. On a CPU as measured (7 µs a run, one thread, layers from
#: 256 × 256 to 2048 × 2048); on an H100 as measured too (43 µs a run, the host's time for three
#: calls), at 100 T multiplications a second.
_LAUNCH_WORTH = {"cpu": 2.5e5, "cuda": 4.0e9}


@dataclass(frozen=True, slots=True)
class Part:
    """One request in a step: `past` tokens of it are in the cache, `count` come now."""

    adapter: Adapter | None
    past: int
    count: int


@dataclass(frozen=True, slots=True)
class Stack:
    """The factors of all adapters on one layer: `down` [ranks, in], `up` [ranks, out].

    `owners` is the uid of each rank's adapter, `places` are their ranks by uid. Stacks of the same
    owners, in whatever layer, have the same `key`.
    """

    key: int
    owners: tuple[int, ...]
    places: dict[int, tuple[int, int]]
    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """`runs` are (first rank, last, first token, last), the lasts excluded.

    `wasted` are products of a token and a rank that are not of the same adapter.
    """

    runs: list[tuple[int, ...]]
    wasted: int


@dataclass(slots=True)
class Step:
    """Whose tokens are where in one packed batch of `tokens`.

    `runs` are (uid, start, stop) of tokens with low-rank adapters; `prompts` are rows that stand
    for virtual tokens, with the place of their first.
    """

    tokens: int
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    prompts: list[tuple[int, Tensor]] = field(default_factory=list)
    _plans: dict[int, Plan] = field(default_factory=dict)
    _owners: Tensor | None = None
    _masks: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Step | None:
        """Lay out a batch in its order; None where nothing is to be added to the base."""
        step = cls(0)
        for part in parts:
            if part.adapter is not None and part.adapter.model is None:
                step._take(part, part.adapter)
            step.tokens += part.count
        return step if step.runs or step.prompts else None

    def _take(self, part: Part, adapter: Adapter) -> None:
        start, stop = self.tokens, self.tokens + part.count
        if adapter.prompt is not None:
            if part.past < adapter.virtual_tokens:
                self.prompts.append((start, adapter.prompt[part.past : part.past + part.count]))
        elif self.runs and self.runs[-1][0] == adapter.uid and self.runs[-1][2] == start:
            self.runs[-1] = (adapter.uid, self.runs[-1][1], stop)
        else:
            self.runs.append((adapter.uid, start, stop))

    def plan(self, stack: Stack) -> Plan:
        """Whose ranks meet which tokens; worked out once for all stacks of the same owners."""
        found = self._plans.get(stack.key)
        if found is None:
            places = stack.places
            runs = [(*places[uid], *run) for uid, *run in self.runs if uid in places]
            needed = sum((stop - start) * (last - first) for first, last, start, stop in runs)
            found = Plan(runs, self.tokens * len(stack.owners) - needed)
            self._plans[stack.key] = found
        return found

    def others(self, stack: Stack, device: torch.device) -> Tensor:
        """Where a token's adapter is not the rank's: bool [tokens, ranks]."""
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
    """Puts adapters into a model that runs, and takes them out; between steps only."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: dict[str, MixedLayer] = {}
        self._prompts = 0
        self._keys: dict[tuple[int, ...], int] = {}  # by owners, of adapters that are here
        self._next_key = count()
        self._embedding: _Wrapped | None = None
        self.step: Step | None = None

    def lay_out(self, parts: Sequence[Part]) -> None:
        """Say whose tokens come in the next forward pass."""
        self.step = Step.of(parts)

    def install(self, adapter: Adapter) -> None:
        """Nothing is left of it should this raise."""
        try:
            for name, factors in adapter.factors.items():
                self._layer(name).put(adapter.uid, factors)
            if adapter.prompt is not None:
                self._prompts += 1
                self._wrap_embedding()
        except BaseException:
            self.remove(adapter)
            raise

    def remove(self, adapter: Adapter) -> None:
        self.step = None
        for name in adapter.factors:
            layer = self._layers.get(name)
            if layer is not None and layer.drop(adapter.uid):
                self._layers.pop(name).unwrap()
        # uids do not come again: what was known by one would stay for good
        self._keys = {who: key for who, key in self._keys.items() if adapter.uid not in who}
        if adapter.prompt is not None and self._prompts:
            self._prompts -= 1
            if not self._prompts and self._embedding is not None:
                self._embedding.unwrap()
                self._embedding = None

    def tensors(self) -> Iterator[Tensor]:
        """All stacks of all layers."""
        for layer in self._layers.values():
            yield from layer.tensors()

    def stack(self, factors: dict[int, Factors]) -> Stack:
        """Lay the factors of a layer side by side, in memory of their own."""
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

    def _layer(self, name: str) -> MixedLayer:
        if name not in self._layers:
            self._layers[name] = MixedLayer(self, self._model.get_submodule(name))
        return self._layers[name]

    def _wrap_embedding(self) -> None:
        if self._embedding is None:
            inputs: Any = self._model
            self._embedding = _Wrapped(inputs.get_input_embeddings())
            self._embedding.wrap(self._embed)

    def _embed(self, plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The base's embedding, with an adapter's own rows where its virtual tokens are."""
        out = plain(*args, **kwargs)
        if self.step is not None:
            flat = out.view(-1, out.shape[-1])
            for start, rows in self.step.prompts:
                flat[start : start + len(rows)] = rows
        return out


class _Wrapped:
    """A module whose forward is ours for a while."""

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
    """A linear layer of the base, and what each adapter adds to it."""

    def __init__(self, mixing: BatchedLora, module: nn.Module) -> None:
        self._mixing = mixing
        self._factors: dict[int, Factors] = {}
        self._stack: Stack | None = None
        self._wrapped = _Wrapped(module)
        self._wrapped.wrap(self._forward)

    def put(self, uid: int, factors: Factors) -> None:
        self._restack(self._factors | {uid: factors})

    def drop(self, uid: int) -> bool:
        """Forget an adapter; True where none is left."""
        self._restack({other: f for other, f in self._factors.items() if other != uid})
        return not self._factors

    def tensors(self) -> Iterator[Tensor]:
        if self._stack is not None:
            yield from (self._stack.down, self._stack.up)

    def unwrap(self) -> None:
        self._wrapped.unwrap()

    def _restack(self, factors: dict[int, Factors]) -> None:
        """Copy all factors side by side, and keep them there only: views are what is left."""
        self._stack = stack = self._mixing.stack(factors) if factors else None
        if stack is not None:
            factors = {
                uid: Factors(stack.down[a:b], stack.up[a:b]) for uid, (a, b) in stack.places.items()
            }
        self._factors = factors

    def _forward(self, plain: Callable[..., Tensor], x: Tensor, *args: Any, **kw: Any) -> Tensor:
        out = plain(x, *args, **kw)
        step, stack = self._mixing.step, self._stack
        if step is not None and step.runs and stack is not None:
            _add(step, stack, x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]))
        return out


def _add(step: Step, stack: Stack, x: Tensor, out: Tensor) -> None:
    """Change `out` [tokens, out] in place by what the adapters make of `x` [tokens, in]."""
    plan = step.plan(stack)
    if len(plan.runs) > 1 and _stacked_is_quicker(plan, x, out):
        hidden = x @ stack.down.T
        hidden.masked_fill_(step.others(stack, hidden.device), 0)
        out.addmm_(hidden, stack.up)
        return
    for first, last, start, stop in plan.runs:
        hidden = x[start:stop] @ stack.down[first:last].T
        out[start:stop].addmm_(hidden, stack.up[first:last])


def _stacked_is_quicker(plan: Plan, x: Tensor, out: Tensor) -> bool:
    worth = _LAUNCH_WORTH["cpu" if x.device.type == "cpu" else "cuda"]
    extra = plan.wasted * (x.shape[-1] + out.shape[-1])
    return extra < (len(plan.runs) - 1.5) * worth
