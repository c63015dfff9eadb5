"""One-time links that make a browser the owner's, as `servekit up` and `servekit link` print them.

    http://127.0.0.1:8000/ui?token=NONCE+MAC        96 random bits, and half of their HMAC-SHA256

The supervisor makes the tokens and takes each once (`supervisor.admin.browser_links`). The HMAC's
secret is that of the pages' sessions, so that a gateway recognises what no supervisor has made, and
does not ask it: strangers cannot give it work.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from secrets import token_urlsafe

_NONCE_BYTES = _MAC_BYTES = 12
#: Characters of the nonce in base64, which fills them without padding.
_NONCE_CHARS = 16


def make_token(secret: bytes) -> str:
    """Return a new token."""
    nonce = token_urlsafe(_NONCE_BYTES)
    return nonce + _prove(nonce, secret)


def is_genuine(token: str, secret: bytes) -> bool:
    """Return whether the token was made with this secret; in constant time, used or not."""
    nonce, proof = token[:_NONCE_CHARS], token[_NONCE_CHARS:]
    return hmac.compare_digest(_prove(nonce, secret).encode(), proof.encode())


def _prove(nonce: str, secret: bytes) -> str:
    mac = hmac.digest(secret, b"browser link\0" + nonce.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(mac[:_MAC_BYTES]).decode()
