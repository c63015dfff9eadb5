"""Who has signed in on the page: a cookie that says by whose key, until when, and proves it.

    1767225600.MAC.alice        Unix time of its end, HMAC-SHA256, the key's name

The key is not in it. The HMAC is by a secret that the supervisor makes and hands to all gateways,
so that any of them knows a session, and one that is restarted still does; it covers what the key
is recognised by, so that a session ends with its key. The cookie goes to the page alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable

from servekit.protocol.messages import AccessRules, KeyRule

COOKIE = "servekit-session"
LIFE_S = 7 * 86400.0
#: How a session stands in a header of ours, once the gate has found it: `Session TOKEN`.
SCHEME = b"Session "


def issue(rule: KeyRule, rules: AccessRules, now_s: float) -> str:
    """A new session of the holder of this key. `now_s` is Unix time."""
    until = str(int(now_s + LIFE_S))
    return f"{until}.{_proof(until, rule, rules.sessions)}.{rule.name}"


def name_in(token: str, rules: AccessRules, now_s: float) -> str | None:
    """The name of the key that has signed in; None unless it is still a key, and in time."""
    until, _, rest = token.partition(".")
    proof, _, name = rest.partition(".")
    rule = next((one for one in rules.keys if one.name == name), None)
    if rule is None or not rules.sessions or not (until.isascii() and until.isdigit()):
        return None
    expected = _proof(until, rule, rules.sessions)
    if not hmac.compare_digest(expected.encode(), proof.encode()) or len(until) > 12:
        return None
    return name if now_s < int(until) else None


def _proof(until: str, rule: KeyRule, secret: bytes) -> str:
    said = b"\0".join((until.encode(), rule.name.encode(), rule.hash.encode(), rule.digest))
    mac = hmac.digest(secret, said, hashlib.sha256)
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")


# ---- the cookie


def cookie_name(port: int) -> str:
    """Browsers keep cookies by host, whatever the port: two instances there are told apart."""
    return f"{COOKIE}-{port}"


def cookie(port: int, token: str, *, secure: bool) -> bytes:
    """The value of Set-Cookie; an empty token takes the cookie away."""
    life_s = int(LIFE_S) if token else 0
    rest = f"Path=/ui; Max-Age={life_s}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"
    return f"{cookie_name(port)}={token}; {rest}".encode()


def token_in(headers: Iterable[tuple[bytes, bytes]], port: int) -> str:
    """What the request's cookie says, unproved; "" without one."""
    wanted = cookie_name(port).encode()
    for name, value in headers:
        if name == b"cookie":
            for pair in value.split(b";"):
                key, _, token = pair.strip().partition(b"=")
                if key == wanted:
                    return token.decode("latin-1")
    return ""
