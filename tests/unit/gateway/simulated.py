"""Replicas that read prompts and write answers in simulated time, to compare ways of routing.

A replica steps as engines with continuous batching do: each step, every request that answers gets
one token, and what is left of the step's budget reads prompts, the first that came first. A step
takes a fixed time, and more for each token of either kind. Its prefix cache keeps whole blocks,
the least recently used forgotten first, and it is looked into when a prompt's turn comes.

Whatever routes gets real calls and what a gateway knows of its replicas, and nothing else.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, quantiles

from servekit.gateway.routing.balancing.load_balancer import Account, Balancer
from servekit.gateway.routing.balancing.prefix_index import hash_prompt
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import ChatMessage, ModelInfo, ModelStatus, SamplingParams

#: Like a model of 8e9 parameters on one GPU, ten times slower, so that little traffic is much.
STEP_S = 0.02
PROMPT_TOKEN_S = 1 / 3000
ANSWER_TOKEN_S = 1 / 1000
BUDGET = 512
SLOTS = 64
BLOCK = 64
CACHE_TOKENS = 40_000


@dataclass(slots=True, eq=False)
class Request:
    """One call and when it comes; `after` has begun when the one before it has ended."""

    call: InflightRequest
    answer_tokens: int
    at_s: float = 0.0
    then: Callable[[], Request] | None = None  # what the same client asks next
    think_s: float = 0.0
    blocks: Sequence[int] = ()
    tokens: int = 0
    left: int = 0  # tokens of the prompt to be read
    cached: int = 0
    first_s: float = 0.0
    end: Callable[[], object] = int  # at the gateway


class SimulatedReplica:
    """One replica."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.unread: list[Request] = []
        self.answering: list[Request] = []
        self.stepping = False
        self._cache: OrderedDict[int, None] = OrderedDict()

    def step(self, now_s: float) -> tuple[float, list[Request]]:
        """One step from now on: when it is over, and whose answers it ended."""
        answering, read_tokens = list(self.answering), self._read(BUDGET - len(self.answering))
        took_s = STEP_S + PROMPT_TOKEN_S * read_tokens + ANSWER_TOKEN_S * len(answering)
        end_s = now_s + took_s
        for request in [one for one in self.unread if one.left == 0]:
            self.unread.remove(request)
            self.answering.append(request)
            request.first_s = end_s - request.at_s
            self._keep(request.blocks)
            answering.append(request)
        for request in answering:
            request.call.emitted.append(0)
        ended = [one for one in answering if len(one.call.emitted) >= one.answer_tokens]
        for request in ended:
            self.answering.remove(request)
            request.end()
        return end_s, ended

    def _read(self, budget: int) -> int:
        total = 0
        for request in self.unread:
            if total >= budget:
                break
            if request.left < 0:
                request.cached = min(self._match(request.blocks) * BLOCK, request.tokens - 1)
                request.left = request.tokens - request.cached
            tokens = min(request.left, budget - total)
            request.left -= tokens
            total += tokens
        return total

    def _match(self, blocks: Sequence[int]) -> int:
        known = list(itertools.takewhile(self._cache.__contains__, blocks))
        self._keep(known)
        return len(known)

    def _keep(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) * BLOCK > CACHE_TOKENS:
            self._cache.popitem(last=False)


class Seen:
    """A replica as one gateway sees it: a `balancer.Target`."""

    def __init__(self, replica: SimulatedReplica, share: int, block: int = BLOCK) -> None:
        self.replica = replica
        self.name = self.socket = replica.name
        self.share = share
        self.info: ModelInfo | None = ModelInfo(
            8192, SLOTS, True, "simulated", "none", "cpu",
            prefix_block=block, prefix_tokens=CACHE_TOKENS,
        )  # fmt: skip
        self.account: Account | None = None
        self.last_id = 0
        self.calls: dict[int, InflightRequest] = {}
        self.routable = True

    @property
    def credits(self) -> int:
        return SLOTS // self.share - len(self.calls) if self.routable else 0

    def take(self, request: Request) -> None:
        self.last_id += 1
        self.calls[self.last_id] = request.call
        request.end = partial(self.end, self.last_id)
        request.left = -1  # to be looked up
        self.replica.unread.append(request)

    def end(self, id: int) -> None:
        call = self.calls.pop(id)
        if self.account is not None:
            self.account.remove_call(id, call)


Router = Callable[[Sequence[Seen], InflightRequest], Seen | None]


def balanced(policy: str = "auto") -> Router:
    """The gateway's own."""
    balancer: Balancer[Seen] = Balancer()
    balancer.set_status(ModelStatus("m", "-", "-", 0, (), routing=policy))  # type: ignore[arg-type]
    return balancer.choose


def shortest_queue(replicas: Sequence[Seen], call: InflightRequest) -> Seen | None:
    """To whom has the fewest calls; ties go to the first."""
    able = [replica for replica in replicas if replica.credits > 0]
    return min(able, key=lambda replica: len(replica.calls), default=None)


@dataclass(slots=True)
class Outcome:
    """What came of one load."""

    first_s: list[float] = field(default_factory=list)  # time to first token
    prompt_tokens: int = 0
    cached_tokens: int = 0
    end_s: float = 0.0
    chosen: list[str] = field(default_factory=list)

    @property
    def hits(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def mean_s(self) -> float:
        return fmean(self.first_s)

    @property
    def p99_s(self) -> float:
        return quantiles(self.first_s, n=100)[98]


def simulate(
    requests: Sequence[Request], *routers: Router, replicas: int = 4, block: int = BLOCK
) -> Outcome:
    """Run a load to its end, each request by any of the routers, which know nothing of each other.

    `block` is what replicas tell of their prefix caches; 0: nothing.
    With one router this is deterministic; with several, which one it is depends on a seed.
    """
    outcome = Outcome()
    workers = [SimulatedReplica(f"m/{index}") for index in range(replicas)]
    gateways = [
        (route, [Seen(worker, len(routers), block) for worker in workers]) for route in routers
    ]
    dice = random.Random(0)
    serial = itertools.count()
    events: list[tuple[float, int, Request | SimulatedReplica]] = []
    waiting: list[Request] = []
    for request in requests:
        heapq.heappush(events, (request.at_s, next(serial), request))

    def send(request: Request, now_s: float) -> None:
        route, seen = dice.choice(gateways)
        chosen = route(seen, request.call)
        if chosen is None:
            waiting.append(request)
            return
        outcome.chosen.append(chosen.name)
        chosen.take(request)
        worker = chosen.replica
        if not worker.stepping:
            worker.stepping = True
            heapq.heappush(events, (now_s, next(serial), worker))

    while events:
        now_s, _, what = heapq.heappop(events)
        if isinstance(what, Request):
            known = hash_prompt(what.call)
            what.blocks, what.tokens = known.blocks, max(1, known.tokens)
            outcome.prompt_tokens += what.tokens
            send(what, now_s)
            continue
        if not (what.unread or what.answering):
            what.stepping = False
            continue
        end_s, ended = what.step(now_s)
        heapq.heappush(events, (end_s, next(serial), what))
        for request in ended:
            outcome.first_s.append(request.first_s)
            outcome.cached_tokens += request.cached
            outcome.end_s = end_s
            if request.then is not None:
                following = request.then()
                following.at_s = end_s + request.think_s
                heapq.heappush(events, (following.at_s, next(serial), following))
            if waiting:
                send(waiting.pop(0), end_s)
    return outcome


# ---------------------------------------------------------------- loads


def words(random: random.Random, tokens: int) -> str:
    """Text of about so many tokens, unlike any other."""
    return "".join([f"{random.getrandbits(64):016x}" for _ in range(tokens // 4 + 1)])[: 4 * tokens]


def arrivals(random: random.Random, rate: float, count: int) -> Iterator[float]:
    at_s = 0.0
    for _ in range(count):
        at_s += random.expovariate(rate)
        yield at_s


def chat(messages: list[ChatMessage], answer_tokens: int, at_s: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=4 * answer_tokens)
    return Request(InflightRequest("m", params, messages=messages), max(1, answer_tokens), at_s)


def conversations(seed: int, rate: float = 2.0, count: int = 150, turns: int = 6) -> list[Request]:
    """Chats of several turns, each beginning with one of eight long system prompts."""
    chance = random.Random(seed)
    systems = [words(chance, 600) for _ in range(8)]

    def turn(messages: list[ChatMessage], left: int, dice: random.Random) -> Request:
        messages = [*messages, ChatMessage("user", words(dice, dice.randint(20, 200)))]
        answer_tokens = dice.randint(20, 150)
        request = chat(messages, answer_tokens)
        request.think_s = dice.expovariate(1 / 4)
        if left > 1:
            said = [*messages, ChatMessage("assistant", words(dice, answer_tokens))]
            request.then = lambda: turn(said, left - 1, dice)
        return request

    begun = []
    for at_s in arrivals(chance, rate, count):
        dice = random.Random(chance.getrandbits(64))
        first = turn([ChatMessage("system", dice.choice(systems))], dice.randint(2, turns), dice)
        first.at_s = at_s
        begun.append(first)
    return begun


def uniform(seed: int, rate: float = 12.0, count: int = 1500) -> list[Request]:
    """Prompts that have nothing in common, all of a size."""
    chance = random.Random(seed)
    return [
        chat([ChatMessage("user", words(chance, chance.randint(200, 400)))], 64, at_s)
        for at_s in arrivals(chance, rate, count)
    ]


def hot(seed: int, rate: float = 14.0, count: int = 1500) -> list[Request]:
    """One long beginning that all prompts share."""
    chance = random.Random(seed)
    system = ChatMessage("system", words(chance, 1500))
    return [
        chat([system, ChatMessage("user", words(chance, 50))], 64, at_s)
        for at_s in arrivals(chance, rate, count)
    ]


def heavy(seed: int, rate: float = 9.0, count: int = 1500) -> list[Request]:
    """Prompts and answers of which few are very long."""
    chance = random.Random(seed)
    requests = []
    for at_s in arrivals(chance, rate, count):
        prompt = min(6000, int(60 * chance.paretovariate(1.1)))
        answer = min(1500, int(25 * chance.paretovariate(1.2)))
        requests.append(chat([ChatMessage("user", words(chance, prompt))], answer, at_s))
    return requests
