"""What one gateway knows of the replicas of a model, as the facts that `gateway.balance` goes by.

Nothing here is told when a call brings a token: that would be work for each token of each model.
Whether prompts have been read is looked up when the next request is to be sent somewhere. Models
with one replica never come here.

Where nothing but load matters few replicas are looked at, `LOOK` at most, so that a request costs
the same however many there are: of more than that the next ones in turn. The least loaded of eight
is hardly busier than the least of all. To find a prefix or a session's home all are looked at.

Each gateway knows what it has sent itself. Of the calls of others it knows the number, a second
late, by way of the supervisor; of what those have in a replica's cache it knows nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from servekit.gateway.routing.balancing_policy import (
    DECODE_WEIGHT,
    FULL,
    Asked,
    Facts,
    Policy,
    choose,
    in_turn,
)
from servekit.gateway.routing.prefix_index import (
    BLOCK_TOKENS,
    MOST_HELD,
    Prefixes,
    Prompt,
    read,
    stable_hash,
)

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest
    from servekit.protocol.messages import ModelInfo, ModelStatus, ReplicaStatus

#: How much one request counts in an average.
_NEWS = 1 / 16
#: Tokens of an answer, before there was one.
_ANSWER_TOKENS = 128.0
#: Replicas that are looked at where nothing but load matters.
LOOK = 8
#: A replica whose KV cache is full comes after all others: it is as if it owed so much more.
_FULL_TOKENS = 1e15


class Target(Protocol):
    """A replica, as far as it matters here: `pool.Replica`."""

    name: str
    socket: str
    info: ModelInfo | None
    account: Account | None
    share: int  # gateways that send it requests
    last_id: int  # of all that it was sent, in order from 1

    @property
    def calls(self) -> Mapping[int, InflightRequest]: ...  # those that it has, by their ids
    @property
    def credits(self) -> int: ...
    @property
    def routable(self) -> bool: ...


T = TypeVar("T", bound=Target)


class Lengths:
    """How many tokens an answer has, on average."""

    __slots__ = ("average",)

    def __init__(self) -> None:
        self.average = _ANSWER_TOKENS

    def learn(self, tokens: int) -> None:
        """One has ended. What makes no tokens says nothing of how long answers are."""
        if tokens:
            self.average += _NEWS * (tokens - self.average)


class Account:
    """What one replica owes and holds. It goes when the replica does, and a new one knows nothing.

    An answer is taken to be as far from its end at any time as at its beginning, on average: a call
    owes all of it until it ends.
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
        self.last = 0  # which of all requests it was sent last
        self.last_id = 0  # the id of that
        self.told = 0  # which of the supervisor's words the next two are from
        self.others = 0.0  # tokens that it owes other gateways
        self.kv_used = 0.0
        self._lengths = lengths or Lengths()
        self._answers: dict[int, float] = {}  # by call: tokens as expected; the end is a surprise
        # of these, those whose prompt is yet to be read: what they have emitted, which grows, how
        # much that was at first, and the prompt's tokens
        self.unread: dict[int, tuple[list[int], int, float]] = {}

    def held(self, prompt: Prompt) -> int:
        """Tokens of a prompt that its cache holds, in blocks of its own."""
        if not self.block:
            return 0
        tokens = self.prefixes.match(prompt.blocks) * BLOCK_TOKENS
        return tokens - tokens % self.block

    def add(self, id: int, call: InflightRequest, prompt: float, answer: float) -> None:
        """It is being sent a call."""
        self.last_id = id
        answer *= DECODE_WEIGHT
        self._answers[id] = answer
        self.owed += prompt + answer
        if prompt:
            self.unread[id] = call.emitted, len(call.emitted), prompt

    def end(self, id: int, call: InflightRequest) -> None:
        """It has no more to do for a call, for whatever reason."""
        answer = self._answers.pop(id, None)
        if answer is None:
            return
        unread = self.unread.pop(id, None)
        if unread is not None:
            answer += unread[2]
        # the last one leaves no remainder of rounding
        self.owed = self.owed - answer if self._answers else 0.0
        self._lengths.learn(len(call.emitted))

    def before(self, other: Account) -> bool:
        """Of equal loads: less of its KV cache is in use, or it was sent nothing for longer."""
        if self.kv_used != other.kv_used:
            return self.kv_used < other.kv_used
        return self.last < other.last

    def settle(self, target: Target) -> None:
        """Look what has become of its calls."""
        if target.last_id != self.last_id:
            self._catch_up(target)
        unread = self.unread
        while unread:  # prompts are read as they came: the first that is not ends the look
            id, (emitted, began, tokens) = next(iter(unread.items()))
            if len(emitted) <= began:
                return
            del unread[id]
            self.owed -= tokens

    def _catch_up(self, target: Target) -> None:
        """There are calls that were sent when it was the only replica."""
        for id in target.calls.keys() - self._answers.keys():
            self.add(id, target.calls[id], 0.0, self._lengths.average)
        self.last_id = target.last_id


class Balancer(Generic[T]):
    """Chooses among the replicas of one model."""

    def __init__(self) -> None:
        self.policy: Policy = "auto"
        self._lengths = Lengths()
        self._average = DECODE_WEIGHT * _ANSWER_TOKENS  # tokens that a request owes
        self._turn = 0
        self._told: dict[str, ReplicaStatus] = {}  # by socket
        self._words = 1  # of the supervisor, so far

    def set_status(self, status: ModelStatus) -> None:
        """Take the supervisor's word."""
        self.policy = status.routing
        self._told = {replica.socket: replica for replica in status.replicas}
        self._words += 1

    def choose(self, replicas: Collection[T], call: InflightRequest) -> T | None:
        """The replica that is to be sent a call now, and is noted to be; None if all are full."""
        if self.policy == "round_robin":
            return self._in_turn(list(replicas))
        chosen = self._least_loaded(self._few(replicas))
        if chosen is None and len(replicas) > LOOK:
            chosen = self._least_loaded(replicas)  # those that are full take no time
        if chosen is None:
            return None
        replica, account = chosen
        prompt = read(call, blocks=account.block > 0 and self.policy == "auto")
        if prompt.blocks or (call.session and self.policy == "auto"):
            return self._weigh(replicas, call)
        self._note(replica, account, call, prompt, 0)
        return replica

    def note(self, replica: T, call: InflightRequest) -> None:
        """A replica is about to be sent a call, for whatever reason."""
        if self.policy == "round_robin":
            return
        account = self._account(replica)
        prompt = self._read(call, replica, account.block > 0)
        self._note(replica, account, call, prompt, account.held(prompt))

    # ---- three ways to choose

    def _in_turn(self, replicas: list[T]) -> T | None:
        at = in_turn(self._turn, len(replicas), lambda at: replicas[at].credits)
        self._turn += 1
        return None if at is None else replicas[at]

    def _few(self, replicas: Collection[T]) -> Iterable[T]:
        """All, or the next `LOOK` in turn."""
        count = len(replicas)
        if count <= LOOK:
            return replicas
        begin = self._turn * LOOK % count
        few = list(islice(replicas, begin, begin + LOOK))
        return few + list(islice(replicas, LOOK - len(few)))

    def _least_loaded(self, replicas: Iterable[T]) -> tuple[T, Account] | None:
        """As `balance.choose` does where there is no affinity. It is looked at for each request
        that has a choice, so that what has not changed costs no call.
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
                account.settle(replica)
            load = account.owed + account.others
            if account.kv_used >= FULL:
                load += _FULL_TOKENS
            if load < least or (load == least and found and account.before(found[1])):
                found, least = (replica, account), load
        return found

    def _weigh(self, replicas: Iterable[T], call: InflightRequest) -> T | None:
        """By affinity, too."""
        able = [replica for replica in replicas if replica.routable]
        if not able:
            return None
        accounts = [self._account(replica) for replica in able]
        prompt = self._read(call, able[0], any(account.block for account in accounts))
        held = [account.held(prompt) if prompt.blocks else 0 for account in accounts]
        facts = [
            Facts(
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
        asked = Asked(prompt.tokens, session, prompt.head, self._turn, self._average)
        at = choose(self.policy, asked, facts)
        if at is None:
            return None
        self._note(able[at], accounts[at], call, prompt, held[at])
        return able[at]

    # ---- the facts

    def _note(
        self, replica: T, account: Account, call: InflightRequest, prompt: Prompt, held: int
    ) -> None:
        self._turn = account.last = self._turn + 1
        unread = float(max(0, prompt.tokens - held))
        answer = self._expected(call)
        account.add(replica.last_id + 1, call, unread, answer)
        self._average += _NEWS * (unread + DECODE_WEIGHT * answer - self._average)
        if account.block and prompt.blocks:
            account.prefixes.add(prompt.blocks)

    def _account(self, replica: T) -> Account:
        account = replica.account
        if account is None:
            account = replica.account = Account(replica.name, replica.info, self._lengths)
        if account.told != self._words:
            self._tell(replica, account)
        account.settle(replica)
        return account

    def _tell(self, replica: T, account: Account) -> None:
        """Pass on what the supervisor has said of a replica."""
        account.told, account.others, account.kv_used = self._words, 0.0, 0.0
        told = self._told.get(replica.socket)
        if told is None:
            return
        account.kv_used = told.kv_used
        if replica.share > 1:
            others = told.running + told.waiting - len(replica.calls)
            account.others = max(0, others) * DECODE_WEIGHT * self._lengths.average

    def _read(self, call: InflightRequest, one: T, caches: bool) -> Prompt:
        return read(call, blocks=caches and self.policy == "auto", head=one.share > 1)

    def _expected(self, call: InflightRequest) -> float:
        """Tokens of its answer, as far as anybody can know."""
        if call.more.get("task"):
            return 0.0
        limit = call.params.max_tokens
        average = self._lengths.average
        return average if limit is None else min(float(limit), average)
