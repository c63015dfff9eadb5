"""Retry policy for the calls of a dead worker, as pure functions of their earlier attempts.

One death says nothing about the requests that were running: a worker may be killed from outside,
and one bad request takes all its neighbours down. A call therefore counts its deaths *in a row*.
The count starts again from one when the attempt was proven, that is, had brought at least
PROOF_TOKENS new tokens. Two tokens prove that a prefill and a decode step have gone well. Because a
call continues after the tokens it has, a request that kills at a certain length gets there at once
in its next attempt, without new tokens. Chance hardly ever hits a call three times within its first
two tokens. Without the reset, workers that are killed at random would in time cost every long
stream its three deaths.

    deaths in a row   in all    decision
    1                 < 15      AGAIN         on any worker, before all waiting calls
    2                 < 15      ALONE         without other unproven calls, until it is proven
    1 or 2            15        LAST          alone until it is done: it may kill slowly, with
                                              more tokens than the proof needs
    3 or more         any       QUARANTINE
    any               16        QUARANTINE

The worker tells which deaths count for a call. Before it starts a suspect, it sends
`IsolationStarted` to all gateways; it runs the suspect without other unproven calls, and holds new
calls until it sends `IsolationEnded`. When it dies, this counts for its unproven calls:

    the worker's last message           an ordinary call          a suspect
    none, or IsolationEnded             counts                    does not: it was waiting
    IsolationStarted, of this call                                counts
    IsolationStarted, of another        does not: it was held     does not: it was held

In doubt the call is spared: a suspect is never quarantined for a death in which the worker had not
announced its isolation.
"""

from __future__ import annotations

from enum import Enum

from servekit.protocol.messages import PROOF_TOKENS

__all__ = [
    "CHANGED",
    "NOT_RESUMED",
    "PROOF_TOKENS",
    "RetryDecision",
    "deaths_in_a_row",
    "decide_retry",
]

#: Deaths in a row after which a call is retried alone, and after which it is quarantined.
ALONE_AT = 2
QUARANTINE_AT = 3
#: Total deaths after which a call is quarantined, even if its attempts were proven.
MOST_DEATHS = 16
#: Error text for a client with a partial answer of an engine that cannot continue it.
NOT_RESUMED = (
    "the worker died in the middle of the answer, and this model's engine cannot continue it"
    " elsewhere; send the request again"
)
#: The same, if no worker of the generation that began the answer is left.
CHANGED = (
    "its worker ended in the middle of the answer, and another model, adapter or version of it is"
    " served under this name now, which would continue it differently; send the request again"
)


class RetryDecision(Enum):
    AGAIN = "again"
    ALONE = "alone"
    LAST = "last"
    QUARANTINE = "quarantine"


def deaths_in_a_row(before: int, new_tokens: int) -> int:
    """Return the count after one more death, in an attempt that brought `new_tokens`."""
    return 1 if new_tokens >= PROOF_TOKENS else before + 1


def decide_retry(in_a_row: int, in_all: int) -> RetryDecision:
    """Decide about a call that has been running in that many deaths."""
    if in_a_row >= QUARANTINE_AT or in_all >= MOST_DEATHS:
        return RetryDecision.QUARANTINE
    if in_all == MOST_DEATHS - 1:
        return RetryDecision.LAST
    return RetryDecision.ALONE if in_a_row >= ALONE_AT else RetryDecision.AGAIN
