"""An API key at this gateway: its permissions, quotas and recent use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from servekit.errors import Forbidden, RateLimited, RequestError
from servekit.gateway.telemetry.observer import EndObserver
from servekit.protocol.access import SpentBudget
from servekit.protocol.messages import Delta, KeyRule, KeyUse

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest


#: Lifetime of another gateway's count of active requests, which is renewed every second.
FORGET_S = 3.0


class Bucket:
    """A bucket of at most `limit` tokens, refilled by `limit` a minute. It may be overdrawn.

    The limit is a rate per minute and a burst of one minute. Callers pass the time.
    """

    __slots__ = ("_at_s", "_level", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the present level, which may be negative."""
        filled = self._level + (now_s - self._at_s) * self.limit / 60.0
        self._level = min(float(self.limit), filled)
        self._at_s = now_s
        return self._level

    def withdraw(self, count: int, now_s: float) -> None:
        """Take `count` tokens out, even if that overdraws the bucket."""
        self._level = self.level(now_s) - count

    def wait_s(self, wanted: float, now_s: float) -> float:
        """Return the seconds until the bucket holds `wanted` tokens; 0 if it does already."""
        return max(0.0, (wanted - self.level(now_s)) * 60.0 / self.limit)

    def set_limit(self, limit: int, now_s: float) -> None:
        """Change the limit; tokens already used stay used."""
        used = self.limit - self.level(now_s)
        self.limit, self._level = limit, limit - used


class ApiKey(EndObserver):
    """The rule of one key and its use.

    A request is charged when it arrives, its tokens when it ends.
    """

    __slots__ = (
        "_elsewhere",
        "_models",
        "_told_active",
        "_untold",
        "active",
        "limited",
        "on_active",
        "requests",
        "rule",
        "spent",
        "tokens",
    )

    def __init__(self, rule: KeyRule, now_s: float) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.spent: SpentBudget | None = None  # its budget of the day or month is used up
        self.active = 0  # calls in flight at this gateway
        self._elsewhere: dict[str, tuple[int, float]] = {}  # by gateway: active calls, time heard
        self._untold = [0, 0]  # requests and tokens not yet reported to the other gateways
        self._told_active = 0
        #: Called after each change of `active` that other gateways need to know soon.
        self.on_active: Callable[[ApiKey], None] = lambda _: None
        self.set_rule(rule, now_s)

    def set_rule(self, rule: KeyRule, now_s: float) -> None:
        """Adopt another rule; earlier use still counts."""
        self.rule = rule
        self._models = None if rule.models is None else frozenset(rule.models)
        self.requests = _bucket(self.requests, rule.requests_per_minute, now_s)
        self.tokens = _bucket(self.tokens, rule.tokens_per_minute, now_s)
        #: Whether responses carry `x-ratelimit-…` headers.
        self.limited = self.requests is not None or self.tokens is not None

    def may_use(self, model: str, base: str = "") -> bool:
        """Return whether the key may use a model, given by its own name and not by an alias.

        A key may use an adapter if its rule names the adapter or the adapter's `base`.
        """
        models = self._models
        return models is None or model in models or (bool(base) and base in models)

    # ---- a request

    def charge_request(self) -> RequestError | None:
        """Count a new request; if it exceeds a limit, return the error and do not count it."""
        if (refused := self.check_tokens()) is not None or (requests := self.requests) is None:
            return refused
        now_s = time.monotonic()
        if requests.level(now_s) < 1.0:
            return self._too_many("requests", requests.limit, requests.wait_s(1.0, now_s))
        requests.withdraw(1, now_s)
        self._untold[0] += 1
        return None

    def check_tokens(self) -> RequestError | None:
        """Return the error of a key whose budget, or whose tokens of the minute, are used up."""
        if self.spent is not None and (refused := _over_budget(self.spent)) is not None:
            return refused
        if (tokens := self.tokens) is None or tokens.level(now_s := time.monotonic()) > 0.0:
            return None
        return self._too_many("tokens", tokens.limit, tokens.wait_s(1.0, now_s))

    def _too_many(self, what: str, limit: int, wait_s: float) -> RequestError:
        return RateLimited(
            f"the key {self.rule.name!r} has used up its {limit} {what} a minute;"
            f" try again in {math.ceil(wait_s)} s",
            retry_after_s=math.ceil(wait_s),
        )

    def rate_limit_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return OpenAI's rate limit headers: the limits, the remainders and the reset times."""
        now_s = time.monotonic()
        parts: list[tuple[bytes, bytes]] = []
        for what, bucket in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if bucket is not None:
                left = max(0, int(bucket.level(now_s)))
                reset = _duration(bucket.wait_s(bucket.limit, now_s))
                parts += (
                    (b"x-ratelimit-limit-" + what, b"%d" % bucket.limit),
                    (b"x-ratelimit-remaining-" + what, b"%d" % left),
                    (b"x-ratelimit-reset-" + what, reset),
                )
        return tuple(parts)

    # ---- a call

    def admit_call(self, call: InflightRequest, model: str, adapter: str = "") -> None:
        """Admit a call for a model, given by its own name, or for an `adapter` of it.

        Sets the call's key and priority. Raises Forbidden and RateLimited.
        """
        rule = self.rule
        if not (self.may_use(adapter, model) if adapter else self.may_use(model)):
            raise Forbidden(f"the key {rule.name!r} may not use {call.model!r}", param="model")
        most = rule.max_concurrent
        if most is not None and self.active + self._active_elsewhere() >= most:
            raise RateLimited(
                f"the key {rule.name!r} has {most} requests under way already, its limit",
                retry_after_s=1,
            )
        call.caller, call.key = self, rule.name
        call.priority = max(call.priority, rule.priority) if call.priority else rule.priority

    def on_started(self, call: InflightRequest) -> None:
        """Count an admitted call as active, until `on_ended`."""
        self.active += 1
        if self.rule.max_concurrent is not None:
            self.on_active(self)

    def on_ended(self, call: InflightRequest, outcome: str, last: Delta | None) -> None:
        """Charge the tokens of a call that has ended."""
        self.active -= 1
        if self.rule.max_concurrent is not None:
            self.on_active(self)
        if self.tokens is not None:
            used = call.prompt_tokens
            used += call.answer_tokens if last is None else last.completion_tokens
            self.tokens.withdraw(used, time.monotonic())
            self._untold[1] += used

    # ---- the other gateways

    def use(self) -> KeyUse | None:
        """Return the use to report to the other gateways; None if there is nothing to report."""
        (requests, tokens), active = self._untold, self.active
        matters = self.rule.max_concurrent is not None and (active or self._told_active)
        if not (requests or tokens or matters):
            return None
        self._untold, self._told_active = [0, 0], active
        return KeyUse(self.rule.name, requests, tokens, active)

    def add_usage(self, gateway: str, use: KeyUse) -> None:
        """Count the key's use at another gateway."""
        now_s = time.monotonic()
        if self.requests is not None:
            self.requests.withdraw(use.requests, now_s)
        if self.tokens is not None:
            self.tokens.withdraw(use.tokens, now_s)
        self._elsewhere[gateway] = (use.active, now_s)

    def _active_elsewhere(self) -> int:
        """Sum the active calls of gateways that have reported lately, and so are alive."""
        since_s = time.monotonic() - FORGET_S
        return sum(active for active, heard_s in self._elsewhere.values() if heard_s > since_s)


def _over_budget(spent: SpentBudget) -> RequestError | None:
    """Return the error of a key whose budget is used up; None once the next period has begun."""
    left_s = spent.resets_at - time.time()
    if left_s <= 0:
        return None
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(spent.resets_at))
    return RateLimited(
        f"the key {spent.name!r} has used up its {spent.limit} {spent.period} tokens;"
        f" they are renewed at {at}",
        retry_after_s=math.ceil(left_s),
    )


def _bucket(old: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if limit is None:
        return None
    if old is None:
        return Bucket(limit, now_s)
    if old.limit != limit:
        old.set_limit(limit, now_s)
    return old


def _duration(seconds: float) -> bytes:
    """Format a duration as OpenAI does: 120ms, 12.5s, 1m3s."""
    if seconds < 1.0:
        return b"%dms" % math.ceil(seconds * 1000)
    if seconds < 60.0:
        return b"%.3gs" % seconds
    minutes, rest = divmod(math.ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest)
