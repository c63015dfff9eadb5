"""What one gateway knows of the replicas of a model, as the facts that `gateway.balance` goes by.

Nothing here is told when a call ends, or brings a token: that would be work for each token of each
model. What has become of a replica's calls is looked up when the next request is to be sent
somewhere, which costs a few microseconds, and models with one replica never come here.

Each gateway knows what it has sent itself. Of the calls of others it knows the number, a second
late, by way of the supervisor; of what those have in a replica's cache it knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from servekit.gateway.balance import DECODE_WEIGHT, Asked, Facts, Policy, choose
from servekit.gateway.prefixes import BLOCK_TOKENS, MOST_HELD, Prefixes, Prompt, read, stable_hash

if TYPE_CHECKING:
    from servekit.gateway.call import Call
    from servekit.wire.messages import ModelInfo, ModelStatus, ReplicaStatus

#: How much one request counts in an average.
_NEWS = 1 / 16
#: Tokens of an answer, before there was one.
_ANSWER_TOKENS = 128.0


class Target(Protocol):
    """A replica, as far as it matters here: `pool.Replica`."""

    name: str
    socket: str
    info: ModelInfo | None
    account: Account | None
    share: int  # gateways that send it requests
    last_id: int  # of all that it was sent, in order from 1

    @property
    def calls(self) -> Mapping[int, Call]: ...  # those that it has, by their ids
    @property
    def credits(self) -> int: ...
    @property
    def routable(self) -> bool: ...


T = TypeVar("T", bound=Target)


class _Debt:
    """What a replica owes for one call. `emitted` is the call's own list, and grows."""

    __slots__ = ("answer", "began", "emitted", "prompt")

    def __init__(self, emitted: list[int], prompt: float, answer: float) -> None:
        self.emitted = emitted
        self.began = len(emitted)
        self.prompt = prompt  # tokens; 0 once it has been read
        self.answer = answer  # tokens, as expected; its end comes as a surprise


class Account:
    """What one replica owes and holds. It goes when the replica does, and a new one knows nothing.

    An answer is taken to be as far from its end at any time as at its beginning, on average: a call
    owes all of it until it ends.
    """

    def __init__(self, name: str, info: ModelInfo | None) -> None:
        self.seed = stable_hash(name.encode())
        self.block = 0 if info is None else info.prefix_block
        tokens = 0 if info is None else info.prefix_tokens
        self.prefixes = Prefixes(min(MOST_HELD, tokens // BLOCK_TOKENS) if tokens else MOST_HELD)
        self.owed = 0.0
        self.last = 0  # which of all requests it was sent last
        self._debts: dict[int, _Debt] = {}
        self._unread: dict[int, _Debt] = {}  # of these, those whose prompt is yet to be read
        self._last_id = 0

    def held(self, prompt: Prompt) -> int:
        """Tokens of a prompt that its cache holds, in blocks of its own."""
        if not self.block:
            return 0
        tokens = self.prefixes.match(prompt.blocks) * BLOCK_TOKENS
        return tokens - tokens % self.block

    def add(self, id: int, call: Call, prompt: float, answer: float) -> None:
        """It is being sent a call."""
        self._last_id = id
        self._debts[id] = self._unread[id] = _Debt(call.emitted, prompt, answer)
        self.owed += prompt + DECODE_WEIGHT * answer

    def settle(self, target: Target, answer: float) -> Sequence[int]:
        """Look what has become of its calls; the lengths of answers that have ended."""
        if target.last_id != self._last_id:
            self._catch_up(target, answer)
        ended: Sequence[int] = ()
        if len(self._debts) != len(target.calls):
            ended = [self._close(id) for id in self._debts.keys() - target.calls.keys()]
        if self._unread:
            self._note_read()
        return ended

    def _note_read(self) -> None:
        """Prompts are read in the order in which they came: the first that is not ends the look."""
        unread = self._unread
        while unread:
            id, debt = next(iter(unread.items()))
            if len(debt.emitted) <= debt.began:
                return
            del unread[id]
            self.owed -= debt.prompt
            debt.prompt = 0.0

    def _catch_up(self, target: Target, answer: float) -> None:
        """There are calls that were sent when it was the only replica."""
        for id in target.calls.keys() - self._debts.keys():
            self.add(id, target.calls[id], 0.0, answer)
        self._last_id = target.last_id

    def _close(self, id: int) -> int:
        debt = self._debts.pop(id)
        self._unread.pop(id, None)
        self.owed -= debt.prompt + DECODE_WEIGHT * debt.answer
        if not self._debts:
            self.owed = 0.0  # and no remainder of rounding
        return len(debt.emitted)


class Balancer(Generic[T]):
    """Chooses among the replicas of one model."""

    def __init__(self) -> None:
        self.policy: Policy = "auto"
        self._answer = _ANSWER_TOKENS  # tokens of one, on average
        self._average = DECODE_WEIGHT * _ANSWER_TOKENS  # tokens that a request owes
        self._turn = 0
        self._told: dict[str, ReplicaStatus] = {}  # by socket

    def set_status(self, status: ModelStatus) -> None:
        """Take the supervisor's word."""
        self.policy = status.routing
        self._told = {replica.socket: replica for replica in status.replicas}

    def choose(self, replicas: Iterable[T], call: Call) -> T | None:
        """The replica that is to be sent a call now, and is noted to be; None if all are full."""
        able = [replica for replica in replicas if replica.routable]
        if self.policy == "round_robin":
            return self._in_turn(able)
        if max([replica.credits for replica in able], default=0) <= 0:
            return None
        accounts = [self._account(replica) for replica in able]
        prompt = self._read(call, able[0], accounts)
        held = [account.held(prompt) if prompt.blocks else 0 for account in accounts]
        facts = [
            self._facts(replica, account, tokens)
            for replica, account, tokens in zip(able, accounts, held, strict=True)
        ]
        session = stable_hash(call.session.encode()) if call.session else None
        asked = Asked(prompt.tokens, session, prompt.head, self._turn, self._average)
        at = choose(self.policy, asked, facts)
        if at is None:
            return None
        self._note(able[at], accounts[at], call, prompt, held[at])
        return able[at]

    def _in_turn(self, able: list[T]) -> T | None:
        facts = [Facts(replica.credits, 0.0) for replica in able]
        at = choose(self.policy, Asked(turn=self._turn), facts)
        self._turn += 1
        return None if at is None else able[at]

    def note(self, replica: T, call: Call) -> None:
        """A replica is about to be sent a call, for whatever reason."""
        if self.policy == "round_robin":
            return
        account = self._account(replica)
        prompt = self._read(call, replica, [account])
        self._note(replica, account, call, prompt, account.held(prompt))

    def _note(self, replica: T, account: Account, call: Call, prompt: Prompt, held: int) -> None:
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
            account = replica.account = Account(replica.name, replica.info)
        for ended in account.settle(replica, self._answer):
            if ended:  # what makes no tokens says nothing of how long answers are
                self._answer += _NEWS * (ended - self._answer)
        return account

    def _read(self, call: Call, one: T, accounts: list[Account]) -> Prompt:
        caches = self.policy == "auto" and any(account.block for account in accounts)
        return read(call, blocks=caches, head=one.share > 1)

    def _facts(self, replica: T, account: Account, held: int) -> Facts:
        told, owed = self._told.get(replica.socket), account.owed
        if told is None:
            return Facts(replica.credits, owed, held, 0.0, account.last, account.seed)
        if replica.share > 1:
            others = told.running + told.waiting - len(replica.calls)
            owed += max(0, others) * DECODE_WEIGHT * self._answer
        return Facts(replica.credits, owed, held, told.kv_used, account.last, account.seed)

    def _expected(self, call: Call) -> float:
        """Tokens of its answer, as far as anybody can know."""
        if call.more.get("task"):
            return 0.0
        limit = call.params.max_tokens
        return self._answer if limit is None else min(float(limit), self._answer)
