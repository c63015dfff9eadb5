"""Protection from foreign web pages in a browser on this machine, while there are no keys.

DNS rebinding: a page lets its own name resolve to 127.0.0.1, and the browser takes our responses
for the page's own. Requests with an unknown name in `Host` are refused. IP addresses and localhost
cannot be rebound. Names without a dot and names in .local can be: any machine of the network may
answer for them, by LLMNR and mDNS.

Cross-origin requests: a page sends a form or a plain POST. The page could not read the response,
but the request would run; it is refused by its `Origin`.

With keys these checks are not needed, because a foreign page has no key. On an address beyond
loopback without keys, `--insecure` has allowed every client.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping

from servekit.errors import Forbidden

#: Checked hosts that are remembered; further hosts are checked with each request.
_MOST_KNOWN = 256


class CsrfCheck:
    """Checks the Host and Origin headers of requests.

    `hosts` are further names of this machine; `origins` are allowed origins, "*" for all.
    """

    def __init__(self, hosts: Iterable[str], origins: Collection[str]) -> None:
        self._names = {host.lower() for host in hosts}
        self._origins = origins
        self._known: set[bytes] = set()

    def check_request(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise Forbidden for a request of a foreign page. On the hot path of every request."""
        host, origin = headers.get(b"host", b""), headers.get(b"origin", b"")
        if host not in self._known:
            self._check_host(host)
        if origin and not self._is_ours(origin.decode("latin-1"), host.decode("latin-1")):
            raise Forbidden(
                "pages of another site may not use this; server.cors, or server.hosts, allows them"
            )

    def _check_host(self, host: bytes) -> None:
        name = _name_of(host.decode("latin-1").lower())
        if not (is_local(name) or name in self._names):
            raise Forbidden(
                f"the Host header says {name[:100]!r}, which is not a name of this machine; if it"
                " is, list it under server.hosts, or configure keys"
            )
        if len(self._known) < _MOST_KNOWN:
            self._known.add(host)

    def _is_ours(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, _, rest = origin.partition("://")
        if scheme not in ("http", "https"):  # not a web page: app://, vscode-webview://, tauri://
            return bool(rest)
        return rest == host or _name_of(rest.lower()) in self._names


def is_local(name: str) -> bool:
    """Return whether only the owner of this machine or its name server can rebind this name."""
    if name in ("", "localhost") or name.endswith((".localhost", ".internal")):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Return the host without its port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
