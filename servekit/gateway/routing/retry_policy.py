"""What becomes of a call when its worker dies: a pure function of how its attempts went.

A death alone says nothing about the requests that were running in it: a worker may be killed from
outside, and one bad request takes all its neighbours down with it. So a call counts its deaths
*in a row*, and starts again from one when the attempt that ended was proven: when it had brought
at least PROOF_TOKENS new tokens. Two of them need a prefill and a decode step to have gone well,
and as a call goes on after the tokens it has, a request that kills at a certain length gets there
at once in its next attempt and has nothing new to show. Chance hardly ever hits a call three
times within its first two tokens; without the reset it would hit every long stream sooner or
later, if workers are killed at random.

    deaths in a row   in all    fate
    1                 < 15      AGAIN         on any worker, before all that waits
    2                 < 15      ALONE         nothing else unproven beside it, until it is proven
    1 or 2            15        LAST          alone until it is done: it may kill slowly, by
                                              more tokens than the proof needs
    3 or more         any       QUARANTINE
    any               16        QUARANTINE

Which deaths are a call's own is told by the worker. It starts a suspect beside nothing unproven,
of whichever gateway, and has said so with `Alone` to all of them before; what comes meanwhile it
holds until it says `Together`. So when it dies, of the calls that brought no proof:

    the worker had said last    a call of no suspicion    a suspect
    nothing, or Together        counts                    doesn't: it waited for its turn
    Alone, of this call                                   counts
    Alone, of another           doesn't: it was held      doesn't: it was held

In doubt that errs on the side of the call: none is quarantined for a death in which the worker had
not said that it was alone.
"""

from __future__ import annotations

from enum import Enum

from servekit.protocol.messages import PROOF_TOKENS

__all__ = ["CHANGED", "NOT_RESUMED", "PROOF_TOKENS", "RetryDecision", "deaths_in_a_row", "fate"]

#: Deaths in a row after which a call is replayed alone, and after which it is quarantined.
ALONE_AT = 2
QUARANTINE_AT = 3
#: Deaths in all that no request survives, whatever it had to show.
MOST_DEATHS = 16
#: What a client is told that has seen a part of an answer, of an engine that cannot continue it.
NOT_RESUMED = (
    "the worker died in the middle of the answer, and this model's engine cannot go on where"
    " another left off; ask again"
)
#: The same, where none is left of what has begun the answer.
CHANGED = (
    "its worker ended in the middle of the answer, and another model, adapter or version of it is"
    " served under this name by now, which would go on in other words; ask again"
)


class RetryDecision(Enum):
    AGAIN = "again"
    ALONE = "alone"
    LAST = "last"
    QUARANTINE = "quarantine"


def deaths_in_a_row(before: int, new_tokens: int) -> int:
    """The count after one more death, in an attempt that brought `new_tokens`."""
    return 1 if new_tokens >= PROOF_TOKENS else before + 1


def fate(in_a_row: int, in_all: int) -> RetryDecision:
    """What to do with a call that has been running in that many deaths."""
    if in_a_row >= QUARANTINE_AT or in_all >= MOST_DEATHS:
        return RetryDecision.QUARANTINE
    if in_all == MOST_DEATHS - 1:
        return RetryDecision.LAST
    return RetryDecision.ALONE if in_a_row >= ALONE_AT else RetryDecision.AGAIN
