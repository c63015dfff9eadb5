"""A gateway's view of the replicas of a model: the input of `balancing_policy`.

Tokens do not update this view, which would cost work for each token of each model. The progress of
prompts is looked up when the next request is sent. Models with one replica do not use this module.

When only load matters, at most `LOOK` replicas are compared, the next ones in turn, so that the
cost of a request does not grow with the number of replicas. The least loaded of eight is hardly
busier than the least loaded of all. For a prefix or a session's home all replicas are compared.

Each gateway knows the calls that it has sent itself. Of other gateways it learns the number of
calls from the supervisor, with a delay of a second, but not what their calls left in KV caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from servekit.gateway.routing.balancing.balancing_policy import (
    DECODE_WEIGHT,
    FULL,
    Policy,
    ReplicaLoad,
    RequestTraits,
    choose_replica,
    in_turn,
)
from servekit.gateway.routing.balancing.prefix_index import (
    BLOCK_TOKENS,
    MOST_HELD,
    Prefixes,
    Prompt,
    hash_prompt,
    stable_hash,
)

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest
    from servekit.protocol.messages import ModelInfo, ModelStatus, ReplicaStatus

#: Weight of a new value in the moving averages.
_NEWS = 1 / 16
#: Assumed tokens of an answer, before there was one.
_ANSWER_TOKENS = 128.0
#: Replicas that are compared when only load matters.
LOOK = 8
#: Extra load of a replica whose KV cache is full, so that it comes after all others.
_FULL_TOKENS = 1e15


class Target(Protocol):
    """The part of a replica's interface that is needed here; see `WorkerConnection`."""

    name: str
    socket: str
    info: ModelInfo | None
    account: Account | None
    share: int  # number of gateways that send it requests
    last_id: int  # wire id of the last call that it was sent; ids count from 1

    @property
    def calls(self) -> Mapping[int, InflightRequest]: ...  # in flight, by wire id
    @property
    def credits(self) -> int: ...
    @property
    def routable(self) -> bool: ...


T = TypeVar("T", bound=Target)


class Lengths:
    """The moving average of the tokens of an answer."""

    __slots__ = ("average",)

    def __init__(self) -> None:
        self.average = _ANSWER_TOKENS

    def add_answer(self, tokens: int) -> None:
        """Count a finished answer, unless it has no tokens (such as an embedding)."""
        if tokens:
            self.average += _NEWS * (tokens - self.average)


class Account:
    """The load of one replica and the prefixes in its cache; it lives as long as the replica.

    The expected rest of an answer does not shrink as the answer grows: a call counts with the whole
    expected length until it ends.
    """

    __slots__ = (
        "_answers",
        "_lengths",
        "block",
        "kv_used",
        "last",
        "last_id",
        "others",
        "owed",
        "prefixes",
        "seed",
        "told",
        "unread",
    )

    def __init__(self, name: str, info: ModelInfo | None, lengths: Lengths | None = None) -> None:
        self.seed = stable_hash(name.encode())
        self.block = 0 if info is None else info.prefix_block
        tokens = 0 if info is None else info.prefix_tokens
        self.prefixes = Prefixes(min(MOST_HELD, tokens // BLOCK_TOKENS) if tokens else MOST_HELD)
        self.owed = 0.0  # tokens
        self.last = 0  # number of the last request that it was sent
        self.last_id = 0  # wire id of that request
        self.told = 0  # number of the supervisor's report with the next two values
        self.others = 0.0  # tokens that it owes to other gateways
        self.kv_used = 0.0
        self._lengths = lengths or Lengths()
        self._answers: dict[int, float] = {}  # expected tokens, by wire id
        # calls with an unread prompt: their growing list of emitted tokens, its length at the
        # start, and the prompt's uncached tokens
        self.unread: dict[int, tuple[list[int], int, float]] = {}

    def cached_tokens(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt in the replica's cache, a multiple of its block size."""
        if not self.block:
            return 0
        tokens = self.prefixes.match(prompt.blocks) * BLOCK_TOKENS
        return tokens - tokens % self.block

    def add_call(self, id: int, call: InflightRequest, prompt: float, answer: float) -> None:
        """Count a call that is being sent: `prompt` uncached and `answer` expected tokens."""
        self.last_id = id
        answer *= DECODE_WEIGHT
        self._answers[id] = answer
        self.owed += prompt + answer
        if prompt:
            self.unread[id] = call.emitted, len(call.emitted), prompt

    def remove_call(self, id: int, call: InflightRequest) -> None:
        """Remove a call that has left the replica, for whatever reason."""
        answer = self._answers.pop(id, None)
        if answer is None:
            return
        unread = self.unread.pop(id, None)
        if unread is not None:
            answer += unread[2]
        # reset when the last call ends, so that rounding errors do not accumulate
        self.owed = self.owed - answer if self._answers else 0.0
        self._lengths.add_answer(len(call.emitted))

    def before(self, other: Account) -> bool:
        """Return whether this replica wins a tie: less KV cache in use, or less recently used."""
        if self.kv_used != other.kv_used:
            return self.kv_used < other.kv_used
        return self.last < other.last

    def update_owed(self, target: Target) -> None:
        """Update `owed` for prompts that have been read since the last look."""
        if target.last_id != self.last_id:
            self._catch_up(target)
        unread = self.unread
        while unread:  # prompts are read in order: stop at the first unread one
            id, (emitted, began, tokens) = next(iter(unread.items()))
            if len(emitted) <= began:
                return
            del unread[id]
            self.owed -= tokens

    def _catch_up(self, target: Target) -> None:
        """Add the calls that were sent while this was the only replica."""
        for id in target.calls.keys() - self._answers.keys():
            self.add_call(id, target.calls[id], 0.0, self._lengths.average)
        self.last_id = target.last_id


class Balancer(Generic[T]):
    """The load balancer of one model."""

    def __init__(self) -> None:
        self.policy: Policy = "auto"
        self._lengths = Lengths()
        self._average = DECODE_WEIGHT * _ANSWER_TOKENS  # tokens that a request owes
        self._turn = 0
        self._told: dict[str, ReplicaStatus] = {}  # by socket
        self._words = 1  # number of the supervisor's reports so far

    def set_status(self, status: ModelStatus) -> None:
        """Adopt the supervisor's report on the model."""
        self.policy = status.routing
        self._told = {replica.socket: replica for replica in status.replicas}
        self._words += 1

    def choose(self, replicas: Collection[T], call: InflightRequest) -> T | None:
        """Choose the replica for a call, and count the call there; None if all are full."""
        if self.policy == "round_robin":
            return self._in_turn(list(replicas))
        chosen = self._least_loaded(self._few(replicas))
        if chosen is None and len(replicas) > LOOK:
            chosen = self._least_loaded(replicas)  # full replicas cost no time
        if chosen is None:
            return None
        replica, account = chosen
        prompt = hash_prompt(call, blocks=account.block > 0 and self.policy == "auto")
        if prompt.blocks or (call.session and self.policy == "auto"):
            return self._weigh(replicas, call)
        self._note(replica, account, call, prompt, 0)
        return replica

    def record_call(self, replica: T, call: InflightRequest) -> None:
        """Count a call that is sent to a replica not chosen by `choose`."""
        if self.policy == "round_robin":
            return
        account = self._account(replica)
        prompt = self._read(call, replica, account.block > 0)
        self._note(replica, account, call, prompt, account.cached_tokens(prompt))

    # ---- the policies

    def _in_turn(self, replicas: list[T]) -> T | None:
        at = in_turn(self._turn, len(replicas), lambda at: replicas[at].credits)
        self._turn += 1
        return None if at is None else replicas[at]

    def _few(self, replicas: Collection[T]) -> Iterable[T]:
        """Return all replicas, or the next `LOOK` in turn."""
        count = len(replicas)
        if count <= LOOK:
            return replicas
        begin = self._turn * LOOK % count
        few = list(islice(replicas, begin, begin + LOOK))
        return few + list(islice(replicas, LOOK - len(few)))

    def _least_loaded(self, replicas: Iterable[T]) -> tuple[T, Account] | None:
        """Choose as `balancing_policy.choose_replica` without affinity.

        On the hot path: an account that has not changed costs no function call.
        """
        found: tuple[T, Account] | None = None
        least, words = inf, self._words
        for replica in replicas:
            if replica.credits <= 0:  # or not routable
                continue
            account = replica.account
            if account is None or account.told != words:
                account = self._account(replica)
            elif account.unread or account.last_id != replica.last_id:
                account.update_owed(replica)
            load = account.owed + account.others
            if account.kv_used >= FULL:
                load += _FULL_TOKENS
            if load < least or (load == least and found and account.before(found[1])):
                found, least = (replica, account), load
        return found

    def _weigh(self, replicas: Iterable[T], call: InflightRequest) -> T | None:
        """Choose by `balancing_policy.choose_replica`, with affinity."""
        able = [replica for replica in replicas if replica.routable]
        if not able:
            return None
        accounts = [self._account(replica) for replica in able]
        prompt = self._read(call, able[0], any(account.block for account in accounts))
        held = [account.cached_tokens(prompt) if prompt.blocks else 0 for account in accounts]
        facts = [
            ReplicaLoad(
                replica.credits,
                account.owed + account.others,
                tokens,
                account.kv_used,
                account.last,
                account.seed,
            )
            for replica, account, tokens in zip(able, accounts, held, strict=True)
        ]
        session = stable_hash(call.session.encode()) if call.session else None
        asked = RequestTraits(prompt.tokens, session, prompt.head, self._turn, self._average)
        at = choose_replica(self.policy, asked, facts)
        if at is None:
            return None
        self._note(able[at], accounts[at], call, prompt, held[at])
        return able[at]

    # ---- accounts

    def _note(
        self, replica: T, account: Account, call: InflightRequest, prompt: Prompt, held: int
    ) -> None:
        self._turn = account.last = self._turn + 1
        unread = float(max(0, prompt.tokens - held))
        answer = self._expected(call)
        account.add_call(replica.last_id + 1, call, unread, answer)
        self._average += _NEWS * (unread + DECODE_WEIGHT * answer - self._average)
        if account.block and prompt.blocks:
            account.prefixes.add_prompt(prompt.blocks)

    def _account(self, replica: T) -> Account:
        account = replica.account
        if account is None:
            account = replica.account = Account(replica.name, replica.info, self._lengths)
        if account.told != self._words:
            self._copy_report(replica, account)
        account.update_owed(replica)
        return account

    def _copy_report(self, replica: T, account: Account) -> None:
        """Copy the supervisor's report on a replica into its account."""
        account.told, account.others, account.kv_used = self._words, 0.0, 0.0
        told = self._told.get(replica.socket)
        if told is None:
            return
        account.kv_used = told.kv_used
        if replica.share > 1:
            others = told.running + told.waiting - len(replica.calls)
            account.others = max(0, others) * DECODE_WEIGHT * self._lengths.average

    def _read(self, call: InflightRequest, one: T, caches: bool) -> Prompt:
        return hash_prompt(call, blocks=caches and self.policy == "auto", head=one.share > 1)

    def _expected(self, call: InflightRequest) -> float:
        """Estimate the tokens of a call's answer."""
        if call.more.get("task"):
            return 0.0
        limit = call.params.max_tokens
        average = self._lengths.average
        return average if limit is None else min(float(limit), average)
