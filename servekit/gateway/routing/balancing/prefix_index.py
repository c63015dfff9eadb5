"""Index of the prompt prefixes that each replica has processed.

A gateway has no tokenizer: it compares prompts as text, in blocks of `BLOCK_CHARS` characters, and
token ids in blocks of `BLOCK_TOKENS`. A block's key is the hash of its own text and all before it,
as in vLLM's prefix cache. The blocks that a replica has been sent thus form a radix tree in which
the path to a node is its key: a set that holds the parent of each of its members. The longest
prefix is found by bisection.

The hash includes everything before the messages: the adapter (whose KV cache differs from the
base's), the tools, the arguments of the chat template, and the cache salt.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from servekit.gateway.routing.request import CHARS_PER_TOKEN
from servekit.protocol.messages import ChatMessage

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest

BLOCK_TOKENS = 64
BLOCK_CHARS = BLOCK_TOKENS * CHARS_PER_TOKEN
#: Shorter prompts are ignored: their prefill takes less than a step of decoding.
LEAST_BLOCKS = 2
#: Blocks of a prompt that are compared; longer common prefixes are assumed to go on alike.
MOST_BLOCKS = 256
#: Blocks remembered per replica: a million tokens, about 2 MB here.
MOST_HELD = 16_384
#: First blocks of a prompt without messages that identify its conversation.
HEAD_BLOCKS = LEAST_BLOCKS

_encode = msgspec.msgpack.Encoder().encode


class Prompt(NamedTuple):
    """The hashes of a prompt."""

    tokens: int  # estimated
    blocks: Sequence[int] = ()  # of whole blocks with all before; none if short
    head: int | None = None  # 64 bits; of the part that all turns of a conversation share


class Prefixes:
    """The blocks that one replica has been sent, an LRU cache.

    A block outlives the blocks that follow it, as in the KV cache.
    """

    __slots__ = ("_held", "limit")

    def __init__(self, limit: int = MOST_HELD) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self.limit = limit

    def __len__(self) -> int:
        return len(self._held)

    def match(self, blocks: Sequence[int]) -> int:
        """Return the length of a prompt's known prefix, in blocks. O(log blocks)."""
        held = self._held
        if not blocks or blocks[0] not in held:
            return 0
        known, unknown = 1, len(blocks)  # lower and upper bound of the length
        while known < unknown:
            middle = (known + unknown) // 2
            if blocks[middle] in held:
                known = middle + 1
            else:
                unknown = middle
        return known

    def add_prompt(self, blocks: Sequence[int]) -> None:
        """Add the blocks of a prompt that the replica has been sent."""
        held = self._held
        for block in reversed(blocks):  # children first, so that a parent outlives them
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.limit:
            held.popitem(last=False)


def hash_prompt(call: InflightRequest, *, blocks: bool = True, head: bool = False) -> Prompt:
    """Return the hashes of a call's prompt, as far as `blocks` and `head` ask for them.

    Short prompts get no hashes.
    """
    prompt, more = call.prompt, call.more
    if call.cache_salt:
        more = {**more, "cache_salt": call.cache_salt}
    if isinstance(prompt, list):
        return _of_ids(prompt, more, blocks, head)
    if call.messages is None:
        text = prompt or ""
        tokens = (len(text) or sum(map(len, call.more.get("inputs", ())))) // CHARS_PER_TOKEN
        if not blocks or len(text) < LEAST_BLOCKS * BLOCK_CHARS:
            return Prompt(tokens)
        first = text[: HEAD_BLOCKS * BLOCK_CHARS]
    else:
        size = sum([len(message.content) for message in call.messages])
        tokens = size // CHARS_PER_TOKEN
        if not blocks or size < LEAST_BLOCKS * BLOCK_CHARS:
            return Prompt(tokens)
        parts = [_render_message(message) for message in call.messages]
        text = "".join(parts)
        first = "".join(parts[: _opening(call.messages)]) if head else ""
    root = _root(more)
    known = _chain(root, text, BLOCK_CHARS)
    return Prompt(tokens, known, _stable(more, first.encode()) if head else None)


def stable_hash(text: bytes) -> int:
    """Return a 64-bit hash that is the same in all processes."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _of_ids(ids: list[int], more: dict[str, Any], blocks: bool, head: bool) -> Prompt:
    if not blocks or len(ids) < LEAST_BLOCKS * BLOCK_TOKENS:
        return Prompt(len(ids))
    known = _chain(_root(more), tuple(ids[: MOST_BLOCKS * BLOCK_TOKENS]), BLOCK_TOKENS)
    first = _encode(ids[: HEAD_BLOCKS * BLOCK_TOKENS]) if head else b""
    return Prompt(len(ids), known, _stable(more, first) if head else None)


def _chain(root: int, text: Sequence[Hashable], size: int) -> list[int]:
    """Hash each whole block with all before it, by Python's `hash`, valid in this process only."""
    known, last = [], root
    for at in range(0, min(len(text), size * MOST_BLOCKS) - size + 1, size):
        last = hash((last, text[at : at + size]))
        known.append(last)
    return known


def _render_message(message: ChatMessage) -> str:
    """Return a message as text whose beginning does not depend on its end."""
    text = f"{message.role}\x1f{message.content}\x1e"
    if message.tool_calls or message.reasoning or message.name or message.tool_call_id:
        more = (message.tool_calls, message.reasoning, message.name, message.tool_call_id)
        text += repr(_encode(more))
    if message.media:
        text += repr([(one.at, stable_hash(one.data)) for one in message.media])
    return text


def _opening(messages: Sequence[ChatMessage]) -> int:
    """Return the number of messages that open a conversation: up to the user's first."""
    roles = [message.role for message in messages]
    return roles.index("user") + 1 if "user" in roles else 1


def _before(more: dict[str, Any]) -> bytes:
    known = ("adapter", "tools", "template", "cache_salt")
    return _encode([more.get(name) for name in known])


def _root(more: dict[str, Any]) -> int:
    return hash(_before(more)) if more else 0


def _stable(more: dict[str, Any], first: bytes) -> int:
    return stable_hash(_before(more) + first if more else first)
