"""The size of the KV cache: the memory that is really available, and its division.

The library's default considers the machine's total memory. In a container the process may use only
the limit of its cgroup, at every level up to the root.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from servekit.errors import LoadError
from servekit.units import format_bytes

#: Share of available memory for the cache; activations and other processes need the rest.
CPU_FRACTION = 0.4
CUDA_FRACTION = 0.9
#: On a CPU more cache per slot only costs memory: the CPU cannot decode that much at once.
CPU_TOKENS_PER_SLOT = 512
#: Tokens in one forward pass. Few on a CPU, so that a long prompt does not delay the others.
CPU_BATCH_TOKENS = 256
CUDA_BATCH_TOKENS = 2048
CPU_SLOTS = 32
CUDA_SLOTS = 256
#: Kept free on a GPU for workspaces and fragmentation.
CUDA_HEADROOM_BYTES = 512 * 2**20


def default_batch_tokens(device: str) -> int:
    """Return the tokens in one forward pass on a device unless the options say."""
    return CUDA_BATCH_TOKENS if device == "cuda" else CPU_BATCH_TOKENS


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions that determine the size of a cached token."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    hidden: int
    vocab_size: int
    draft_kv_bytes: int = 0  # of one token's keys and values of a draft model

    @property
    def token_kv_bytes(self) -> int:
        """Return the size of one token's keys and values in all layers, also of a draft model."""
        own = 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize
        return own + self.draft_kv_bytes

    @property
    def read_bytes(self) -> int:
        """Return the temporary memory for reading one cached token, in the layer being computed."""
        return (2 * self.kv_heads + 2 * self.heads) * self.head_dim * self.itemsize

    def part(self, ranks: int) -> Shape:
        """Return the part of one of several ranks: its share of the heads."""
        heads, kv_heads = self.heads // ranks, self.kv_heads // ranks
        return replace(self, heads=heads, kv_heads=kv_heads)

    def fixed_bytes(self, batch_tokens: int, slots: int) -> int:
        """Return the size of activations and logits of one forward pass, for any cache size."""
        activations = (
            batch_tokens * self.itemsize * (8 * self.hidden + 4 * self.heads * self.head_dim)
        )
        return activations + 4 * slots * self.vocab_size * 4


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The dimensions of the cache: `blocks` of `block_size` tokens."""

    blocks: int
    block_size: int
    batch_tokens: int
    slots: int
    token_bytes: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def bytes(self) -> int:
        return self.tokens * self.token_bytes

    def halved(self, times: int) -> CachePlan:
        return replace(self, blocks=max(2, self.blocks >> times))


def shape_of(config: Any, itemsize: int) -> Shape:
    """Return the shape from a model's text configuration."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Shape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        itemsize=itemsize,
        hidden=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def context_of(config: Any) -> int | None:
    """Return the context that a model's text configuration states, in tokens; None if none."""
    names = (
        *("max_position_embeddings", "n_positions", "max_sequence_length"),
        *("max_seq_len", "seq_length"),  # of MPT, which fails beyond it, and of Bloom
    )
    stated = [value for name in names if isinstance(value := getattr(config, name, None), int)]
    return next((value for value in stated if value > 0), None)


def plan_cache(
    shape: Shape,
    *,
    cuda: bool,
    available_bytes: int,
    max_context: int,
    block_size: int,
    slots: int | None = None,
    batch_tokens: int | None = None,
    cache_bytes: int | None = None,
) -> CachePlan:
    """Fit the cache into the memory available, and make it no larger than the slots can use.

    Raises LoadError if not even two blocks fit.
    """
    batch_tokens = batch_tokens or (CUDA_BATCH_TOKENS if cuda else CPU_BATCH_TOKENS)
    slots = min(slots or (CUDA_SLOTS if cuda else CPU_SLOTS), batch_tokens)
    tokens = _tokens_that_fit(shape, cuda, available_bytes, batch_tokens, slots, cache_bytes)
    useful = slots * max_context if cuda else slots * CPU_TOKENS_PER_SLOT
    if cache_bytes is None:
        tokens = min(tokens, max(useful, max_context + 2 * block_size))
    blocks = tokens // block_size
    if blocks < 2:
        raise LoadError(
            f"There is no room for a KV cache: {format_bytes(available_bytes)} of memory are "
            f"available and one token takes {shape.token_kv_bytes} bytes. Free some memory, or "
            "use a smaller model.",
            permanent=False,
        )
    return CachePlan(blocks, block_size, batch_tokens, slots, shape.token_kv_bytes)


def _tokens_that_fit(
    shape: Shape, cuda: bool, available: int, batch_tokens: int, slots: int, asked: int | None
) -> int:
    if asked is not None:
        if asked > available:
            raise LoadError(
                f"kv_cache_bytes asks for {format_bytes(asked)}, and only "
                f"{format_bytes(available)} are available.",
                permanent=False,
            )
        return asked // shape.token_kv_bytes
    headroom = CUDA_HEADROOM_BYTES if cuda else 0
    fraction = CUDA_FRACTION if cuda else CPU_FRACTION
    room = int(available * fraction) - headroom - shape.fixed_bytes(batch_tokens, slots)
    mask_bytes = batch_tokens * shape.itemsize  # the library's dense mask has a column per token
    return max(0, room) // (shape.token_kv_bytes + shape.read_bytes + mask_bytes)
