"""Load balancing policies: the choice of a replica as a pure function.

    policy        first condition that holds                      chosen replica
    any           no replica has room                             none: the request waits
    round_robin                                                   the next in turn with room
    least_loaded                                                  the least load
    auto          the request's session has a near home           the session's home
                  a near replica holds half of the prompt         the lowest cost of those near
                  other gateways route, too; the home is near     the home of the prompt's head
                  otherwise                                       the lowest cost of those near

    load    tokens that a replica still has to process, divided by its speed: the uncached tokens of
            unread prompts, and the expected tokens of answers, each worth `DECODE_WEIGHT`
    near    the replica has room, its KV cache is not full, and its load is at most `SPREAD` times
            the least load plus `SLACK` average requests
    cost    load plus the tokens of the prompt that the replica does not hold
    home    the replica with the highest hash of its name and the key (rendezvous hashing): if it
            goes, only its own keys move, evenly to the others, and all gateways agree without
            communication

Ties go to the replica with less of its KV cache in use, then to the least recently used one. If the
caches of all replicas are full, none counts as full.

A cached prefix thus attracts a request as far as it saves work, but not beyond `near`. The cost is
that of NVIDIA Dynamo's router. Overruling affinity when the load is out of balance by a factor and
an amount is from SGLang's cache-aware router. Hashing the prompt's head, for machines that know
nothing of each other, is OpenAI's documented method. Each request is decided separately; running
requests are never moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Policy = Literal["auto", "least_loaded", "round_robin"]

#: Weight of an answer's token in tokens of a prompt. Decoding a token takes longer, but is batched
#: with other requests and delays a new prompt less. In simulation TTFT is constant from 0.25 to 1
#: and grows above that.
DECODE_WEIGHT = 1.0
#: Factor by which a near replica's load may exceed the least load.
SPREAD = 1.5
#: Further average requests by which it may exceed that: under little load, imbalance is harmless.
SLACK = 2.0
#: Used share of a KV cache above which a request would soon have to wait or preempt another.
FULL = 0.9

_MASK = 2**64 - 1


class ReplicaLoad(msgspec.Struct, frozen=True, gc=False):
    """The state of one replica with regard to the request."""

    room: int  # requests that it may be sent now
    owed: float  # tokens; see `load`
    held: int = 0  # tokens of this prompt in its cache, as far as is known
    kv_used: float = 0.0  # used share of its KV cache, 0 to 1
    last: int = 0  # number of the last request that it was sent
    seed: int = 0  # hash of its name, 64 bits
    speed: float = 1.0  # in any unit, the same for all


class RequestTraits(msgspec.Struct, frozen=True, gc=False):
    """The properties of the request that matter for the choice."""

    tokens: int = 0  # of its prompt
    session: int | None = None  # 64-bit hash of the session that it names
    head: int | None = None  # hash of its prompt's head; None where no other gateway routes
    turn: int = 0  # number of requests before it
    average: float = 0.0  # tokens that a request owes on average


def choose_replica(
    policy: Policy, asked: RequestTraits, replicas: Sequence[ReplicaLoad]
) -> int | None:
    """Return the index of the replica that gets the request; None if none has room."""
    if policy == "round_robin":
        return in_turn(asked.turn, len(replicas), lambda at: replicas[at].room)
    able = [at for at, one in enumerate(replicas) if one.room > 0 and one.kv_used < FULL]
    if not able:
        able = [at for at, one in enumerate(replicas) if one.room > 0]
    if len(able) < 2:
        return able[0] if able else None
    loads = [one.owed / one.speed for one in replicas]
    if policy == "least_loaded":
        return _lowest(able, replicas, loads)
    limit = SPREAD * min([loads[at] for at in able]) + SLACK * asked.average
    near = [at for at in able if loads[at] <= limit]
    if asked.session is not None and (at := home_replica(asked.session, replicas)) in near:
        return at
    if asked.head is not None and 2 * max([replicas[at].held for at in near]) < asked.tokens:
        at = home_replica(asked.head, replicas)
        if at in near:
            return at
    tokens = asked.tokens
    costs = [(one.owed + max(0, tokens - one.held)) / one.speed for one in replicas]
    return _lowest(near, replicas, costs)


def home_replica(key: int, replicas: Sequence[ReplicaLoad]) -> int:
    """Return the index of the home of `key` (64 bits), whatever the load."""
    weights = [_mixed(key ^ one.seed) for one in replicas]
    return weights.index(max(weights))


def _lowest(among: Sequence[int], replicas: Sequence[ReplicaLoad], costs: Sequence[float]) -> int:
    least = min([costs[at] for at in among])
    equal = [at for at in among if costs[at] == least]
    if len(equal) == 1:
        return equal[0]
    return min(equal, key=lambda at: (replicas[at].kv_used, replicas[at].last))


def in_turn(turn: int, count: int, room: Callable[[int], int]) -> int | None:
    """Return the index of the next replica in turn that has room; None if none has."""
    for step in range(count):
        at = (turn + step) % count
        if room(at) > 0:
            return at
    return None


def _mixed(value: int) -> int:
    """Mix 64 bits so that each result bit depends on each bit of `value`, as splitmix64 does."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
