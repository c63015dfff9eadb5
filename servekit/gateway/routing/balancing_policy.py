"""Which replica gets a request: a pure function of facts.

    policy        when, the first that holds                      who gets it
    any           no replica has room                             nobody: the request waits
    round_robin                                                   the next in turn that has room
    least_loaded                                                  the one of the least load
    auto          it names a session whose home is near           the home of the session
                  one that is near holds half of the prompt       of those near, the lowest cost
                  other gateways route, too; its home is near     the home of the prompt's head
                  else                                            of those near, the lowest cost

    load    tokens that a replica owes, by its speed: of prompts it has not read those that it does
            not hold, and of answers those that are expected, each worth `DECODE_WEIGHT`
    near    it has room, its KV cache is not full, and its load is at most `SPREAD` times the least
            there is, and `SLACK` average requests
    cost    load, and what reading the prompt would take: the tokens of it that are not held there
    home    the replica of the highest hash of its name and what is to have a home (rendezvous
            hashing): where one goes only what was its own moves, evenly to the others, and all
            gateways agree without a word

Of equals it is the one with less of its KV cache in use, then the one that was sent nothing for
longest. A cache that is full for all is full for none.

So a prefix draws a request as far as it saves work, and no farther than `near`. The sum of load and
of what is missing of the prompt is the cost that NVIDIA Dynamo's router has; that a load out of
balance overrules affinity, and by a factor and an amount, is from SGLang's cache-aware router; that
a prompt's head is hashed for machines that know nothing of each other is what OpenAI tells of its
own. The decision is made anew for each request; what runs is never moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Policy = Literal["auto", "least_loaded", "round_robin"]

#: What a token of an answer counts, in tokens of a prompt. It takes 3 to 8 times as long, but side
#: by side with others, and holds up a new prompt less: in simulation the time to first token is the
#: same from 0.25 to 1, and grows from there.
DECODE_WEIGHT = 1.0
#: How far a load may be above the least, for affinity to hold.
SPREAD = 1.5
#: And this many average requests more; with little to do there is no imbalance to speak of.
SLACK = 2.0
#: The share of a KV cache in use from which a request would soon wait, or throw another out.
FULL = 0.9

_MASK = 2**64 - 1


class Facts(msgspec.Struct, frozen=True, gc=False):
    """One replica that could serve the request at hand, as far as it has room."""

    room: int  # requests that it may be sent now
    owed: float  # tokens; see `load`
    held: int = 0  # tokens of this prompt that its cache holds, as far as is known
    kv_used: float = 0.0  # share of its KV cache in use, 0 to 1
    last: int = 0  # which of all requests it was sent last
    seed: int = 0  # hash of its name, 64 bits
    speed: float = 1.0  # in any unit, the same for all


class Asked(msgspec.Struct, frozen=True, gc=False):
    """The request at hand."""

    tokens: int = 0  # of its prompt
    session: int | None = None  # hash of the session that it names, 64 bits
    head: int | None = None  # hash of its prompt's head; None where no other gateway routes
    turn: int = 0  # how many there were before it
    average: float = 0.0  # tokens that a request owes on average


def choose(policy: Policy, asked: Asked, replicas: Sequence[Facts]) -> int | None:
    """The index of the replica that gets the request; None if none has room."""
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
    if asked.session is not None and (at := home(asked.session, replicas)) in near:
        return at
    if asked.head is not None and 2 * max([replicas[at].held for at in near]) < asked.tokens:
        at = home(asked.head, replicas)
        if at in near:
            return at
    tokens = asked.tokens
    costs = [(one.owed + max(0, tokens - one.held)) / one.speed for one in replicas]
    return _lowest(near, replicas, costs)


def home(key: int, replicas: Sequence[Facts]) -> int:
    """The index of the replica where `key`, 64 bits, belongs, whatever the load."""
    weights = [_mixed(key ^ one.seed) for one in replicas]
    return weights.index(max(weights))


def _lowest(among: Sequence[int], replicas: Sequence[Facts], costs: Sequence[float]) -> int:
    least = min([costs[at] for at in among])
    equal = [at for at in among if costs[at] == least]
    if len(equal) == 1:
        return equal[0]
    return min(equal, key=lambda at: (replicas[at].kv_used, replicas[at].last))


def in_turn(turn: int, count: int, room: Callable[[int], int]) -> int | None:
    """The index of the next in turn that has room."""
    for step in range(count):
        at = (turn + step) % count
        if room(at) > 0:
            return at
    return None


def _mixed(value: int) -> int:
    """A 64-bit number whose every bit depends on each of `value`: splitmix64's end."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
