"""Web pages of others that reach us through a browser on this machine, while there are no keys.

By another name: a page's own name is made to point to 127.0.0.1 (DNS rebinding), and the browser
takes our answers for the page's own. It says the name in `Host`: one that is not known is refused.
Addresses and localhost are nobody's to give away. Names without a dot and those in .local are: any
machine of the network answers for them, by LLMNR and mDNS.

By another origin: a page sends us a form or a plain POST. It could not read the answer, but it
would run; `Origin` tells it.

Where there are keys they are what counts: no page of others has one. Where we listen beyond
loopback without keys, `--insecure` has said that anybody may.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

from servekit.errors import Forbidden

#: Hosts that have been looked at; more are looked at again.
_MOST_KNOWN = 256


class CsrfCheck:
    """Knows them by a request's headers. `hosts` are names that are ours beside those above."""

    def __init__(self, hosts: Iterable[str], origins: Collection[str]) -> None:
        self._names = {host.lower() for host in hosts}
        self._origins = origins
        self._known: set[bytes] = set()

    def refuse(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise Forbidden for a request of theirs. Called for each request: half a microsecond."""
        found = dict(headers)  # quicker than a loop
        host, origin = found.get(b"host", b""), found.get(b"origin", b"")
        if host not in self._known:
            self._look(host)
        if origin and not self._is_ours(origin.decode("latin-1"), host.decode("latin-1")):
            raise Forbidden(
                "another site's page may not use this; server.cors, or server.hosts, lets it"
            )

    def _look(self, host: bytes) -> None:
        name = _name_of(host.decode("latin-1").lower())
        if not (is_local(name) or name in self._names):
            raise Forbidden(
                f"the Host header says {name[:100]!r}, which is no name of this machine; if it is, "
                "list it under server.hosts, or have keys"
            )
        if len(self._known) < _MOST_KNOWN:
            self._known.add(host)

    def _is_ours(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, _, rest = origin.partition("://")
        if scheme not in ("http", "https"):  # no web page: app://, vscode-webview://, tauri://
            return bool(rest)
        return rest == host or _name_of(rest.lower()) in self._names


def is_local(name: str) -> bool:
    """Whether nobody could point this name at us but who owns the machine or its name server."""
    if name in ("", "localhost") or name.endswith((".localhost", ".internal")):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Without the port, and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
