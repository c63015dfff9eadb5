"""Authorization by API key, for ASGI requests, the fast response path and the chat page.

`AuthMiddleware` identifies the key of a request, and runs the endpoint as that caller (`ACTING`).
The router checks every call here before it accepts it, so that no endpoint can omit the check.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import structlog

from servekit.errors import Forbidden, InvalidKey, RequestError
from servekit.gateway.api.unknown_parameters import UNKNOWN
from servekit.gateway.auth import sessions
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.auth.key_verifier import Verifier
from servekit.gateway.http import request_limits
from servekit.protocol.access import KeyBudgets, RequestLimits
from servekit.protocol.messages import AccessRules, KeyUsage

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest

log: Any = structlog.get_logger("servekit.gateway")

#: How often what a key has asked for is tried again while the key is not in the file.
_REMOVED_S = 5.0

#: The key of the request that is being answered; None without keys.
ACTING: ContextVar[ApiKey | None] = ContextVar("acting", default=None)

Headers = Iterable[tuple[bytes, bytes]]


class KeyRemoved(RequestError):
    """The file has no key of this name any more, and what that has asked for waits. Bring the key
    back, or leave it: it expires.
    """

    status = 503
    code = "key_removed"


class Access:
    """The access rules and the callers that they name. Access is open while there are no keys."""

    def __init__(self) -> None:
        self.rules = AccessRules()
        self.closed = False  # a key is needed
        #: Whether `admit_call` has anything to check; usually it has not.
        self.watchful = False
        self.callers: dict[str, ApiKey] = {}  # by the names of their keys
        #: Called after each change of a limited number of requests under way.
        self.on_active: Callable[[ApiKey], None] = lambda _: None
        self._budgets = KeyBudgets()
        self._verifier = Verifier()
        self._listeners: list[Callable[[], None]] = []

    def apply_rules(self, rules: AccessRules) -> None:
        """Adopt these rules; requests in flight go on."""
        if rules == self.rules:
            return
        now_s = time.monotonic()
        callers, self.callers = self.callers, {}
        for rule in (*rules.keys, sessions.OWNER):
            caller = callers.get(rule.name)
            if caller is None:
                caller = ApiKey(rule, now_s)
                caller.on_active = self.on_active
            else:
                caller.set_rule(rule, now_s)
            self.callers[rule.name] = caller
        self.apply_budgets(self._budgets)
        self.rules = rules
        self.closed = bool(rules.keys)
        self.watchful = self.closed or rules.log_prompts or rules.limits != RequestLimits()
        self._verifier.apply_rules(rules)
        UNKNOWN.policy = rules.unknown_parameters
        for listener in self._listeners:
            listener()

    def apply_budgets(self, budgets: KeyBudgets) -> None:
        """Refuse the keys whose budget is used up, and no others."""
        self._budgets = budgets
        spent = {one.name: one for one in budgets.spent}
        for name, caller in self.callers.items():
            caller.spent = spent.get(name)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the rules."""
        self._listeners.append(listener)

    # ---- the other gateways

    def spent(self, gateway: str) -> KeyUsage | None:
        """Return the new use of keys to report to the other gateways; None if there is none."""
        if not self.closed:
            return None
        uses = tuple(use for caller in self.callers.values() if (use := caller.use()))
        return KeyUsage(gateway, uses) if uses else None

    def add_usage(self, spent: KeyUsage) -> None:
        """Count the use of keys at another gateway."""
        for use in spent.uses:
            if (caller := self.callers.get(use.name)) is not None:
                caller.add_usage(spent.gateway, use)

    # ---- authentication

    def find_verified(self, key: bytes) -> ApiKey | None:
        """Return the caller of a key that has been verified before, else None."""
        name = self._verifier.find_verified(key)
        return None if name is None else self.callers.get(name)

    async def verify(self, key: bytes) -> ApiKey:
        """Return the caller of a key. Raises InvalidKey, and Busy if too many keys wait."""
        name = await self._verifier.verify(key)
        caller = None if name is None else self.callers.get(name)
        if caller is None:
            raise InvalidKey("this API key is not known here")
        return caller

    async def holder(self, headers: Headers) -> ApiKey:
        """Return the caller of a web page, by session, by key, or by key as a Basic password.

        Raises InvalidKey and Busy.
        """
        for name, value in headers:
            if name == b"authorization" and value.startswith(sessions.SCHEME):
                token = value.removeprefix(sessions.SCHEME).decode("latin-1")
                return self._signed_in(token)
        key = key_of(headers, browser=True)
        return self.find_verified(key) or await self.verify(key)

    def _signed_in(self, token: str) -> ApiKey:
        name = sessions.name_in(token, self.rules, time.time())
        caller = None if name is None else self.callers.get(name)
        if caller is None:
            raise InvalidKey("this session is over; sign in again")
        return caller

    async def charge_page_visitor(self, authorization: str) -> ApiKey | None:
        """Return the caller of a web page and charge a request; return None without keys.

        Raises InvalidKey, Busy and RateLimited.
        """
        if not self.closed:
            return None
        caller = await self.holder([(b"authorization", authorization.encode("latin-1"))])
        if (refused := caller.charge_request()) is not None:
            raise refused
        return caller

    def act_for(self, name: str) -> ApiKey | None:
        """Let this context act for the key that has asked for something before; None without keys.

        Raises KeyRemoved: a reload may bring the key back, as where it is replaced in two steps.
        """
        caller = self.callers.get(name)
        if caller is None and self.closed:
            said = f"the key {name!r} is not in the file now"
            raise KeyRemoved(said, retry_after_s=_REMOVED_S)
        ACTING.set(caller)
        return caller

    # ---- authorization

    def admit_call(self, call: InflightRequest, model: str, adapter: str = "") -> None:
        """Admit a call for a model, given by its own name, or for an `adapter` of it.

        Raises Forbidden, RateLimited, RequestError if the call exceeds a limit, and InvalidKey if
        its caller is unknown.
        """
        if self.closed:
            if (caller := self.find_caller(call)) is None:
                raise InvalidKey("an API key is needed")
            caller.admit_call(call, model, adapter)
            if self.rules.prefixes_by_key:
                call.cache_salt = caller.rule.name
        request_limits.check_counts(call.messages, call.params.stop, self.rules.limits)
        if self.rules.log_prompts:
            prompt = call.prompt if call.messages is None else call.messages
            key, name = call.key if self.closed else "", adapter or model
            log.info("prompt", key=key, model=name, prompt=prompt)

    def find_caller(self, call: InflightRequest) -> ApiKey | None:
        """Return the caller of a call, admitted or not; None without keys."""
        return (call.caller or ACTING.get()) if self.closed else None

    def may_use(self, model: str, base: str = "") -> bool:
        """Return whether the current caller may use a model, or an adapter of `base`."""
        caller = ACTING.get()
        return not self.closed or (caller is not None and caller.may_use(model, base))

    def require_model(self, model: str, base: str = "") -> None:
        """Raise Forbidden unless the current caller may use a model; arguments as `may_use`."""
        if not self.may_use(model, base):
            caller = ACTING.get()
            name = caller.rule.name if caller else ""
            raise Forbidden(f"the key {name!r} may not use {model!r}", param="model")

    def require_metrics(self) -> None:
        """Raise Forbidden unless the current caller may read /metrics."""
        caller = ACTING.get()
        if caller is not None and not (caller.rule.metrics or caller.rule.admin):
            needs = "/metrics needs a key with `metrics: true`"
            raise Forbidden(f"{needs}, which the key {caller.rule.name!r} lacks")

    def require_admin(self) -> ApiKey:
        """Return the current caller if it may administer. Raises Forbidden.

        Without keys there is no administration over HTTP; `servekit`'s commands use the control
        socket.
        """
        caller = ACTING.get()
        needs = "this needs a key with `admin: true`"
        if caller is None:
            raise Forbidden(f"{needs}; on this machine use servekit's command line")
        if not caller.rule.admin:
            raise Forbidden(f"the key {caller.rule.name!r} may not administer: {needs}")
        return caller


def key_of(headers: Headers, *, browser: bool = False) -> bytes:
    """Return the key that a request carries. Raises InvalidKey.

    With `browser` the key may also be the password of Basic authentication.
    """
    other = b""
    for name, value in headers:
        if name == b"authorization":
            if key := _credentials(value, browser):
                return key
        elif name in (b"x-api-key", b"api-key"):
            other = value.strip()
    if other:
        return other
    raise InvalidKey("an API key is needed: send it as `Authorization: Bearer KEY`")


def _credentials(value: bytes, browser: bool) -> bytes:
    scheme, _, rest = value.strip().partition(b" ")
    scheme, rest = scheme.lower(), rest.strip()
    if scheme == b"bearer":
        return rest
    if scheme != b"basic" or not browser:
        return b""
    try:
        return base64.b64decode(rest, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
