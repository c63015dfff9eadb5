"""Mutual TLS between the members of a cluster, with errors as sentences.

TLS 1.3 only; both sides present a certificate of the cluster's own authority, and the role in it
decides: hosts come and go, so host names mean nothing. Sessions are never resumed, so every
connection is verified.
"""

from __future__ import annotations

import functools
import os
import ssl
import time
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import structlog

from servekit.errors import StartError, WireError
from servekit.protocol.transport.certificate_authority import SKEW_S, Authority
from servekit.protocol.transport.credentials import Credentials, Role

__all__ = [
    "Authority",
    "Credentials",
    "Member",
    "NotTrusted",
    "Role",
    "tls_context",
]

log: Any = structlog.get_logger("servekit.protocol")

#: Minimum interval between logged refusals: anybody who reaches the port can cause them.
_TELL_EVERY_S = 1.0
_CLOCKS = "compare the clocks of the two machines (timedatectl)"
#: OpenSSL's verify errors (X509_V_ERR_…) as sentences.
_VERDICTS = {
    7: "its certificate is of another cluster, or of an earlier start of this one",
    9: f"its certificate is not valid yet by the clock here, which is behind; {_CLOCKS}",
    10: f"its certificate has expired by the clock here, and it was not renewed; {_CLOCKS}",
    18: "its certificate is its own, and of no cluster",
    19: "its certificate is of another cluster, or of an earlier start of this one",
    20: "its certificate is of another cluster, or of an earlier start of this one",
    26: "its certificate is of a member that may not be at that end of a connection",
}
#: Other handshake errors, by OpenSSL's reason.
_REASONS = {
    "WRONG_VERSION": "the other side does not speak TLS: is that the port of a servekit worker?",
    "PROTOCOL_VERSION": "the other side does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "the other side does not speak TLS 1.3",  # on a server
    "PEER_DID_NOT_RETURN": "the other side has shown no certificate",
    "UNEXPECTED_EOF": "the other side closed the connection during the handshake",
}
#: In TLS 1.3 a server verifies the client after the client's handshake is done; its log says why.
HUNG_UP = (
    "it closed the connection before it identified itself: its log says whether it trusts"
    " our certificate"
)


class NotTrusted(WireError, OSError):
    """A refused connection: one side does not trust the other. Also an OSError."""


class Member(NamedTuple):
    """The peer of a connection, by its certificate."""

    cluster: str
    role: Role
    name: str


def tls_context(credentials: Credentials, side: Literal["client", "server"]) -> ssl.SSLContext:
    """Return the TLS context of a member; contexts are cached.

    Raises StartError, with a sentence, where the certificate is not valid by this machine's clock.
    """
    check_clock(credentials, time.time())
    return _context(credentials, side)


def new_context(credentials: Credentials, side: Literal["client", "server"]) -> ssl.SSLContext:
    """Return a TLS context that is not shared, without a check of the dates."""
    kinds = {"client": ssl.PROTOCOL_TLS_CLIENT, "server": ssl.PROTOCOL_TLS_SERVER}
    made = ssl.SSLContext(kinds[side])
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_verify_locations(cadata=credentials.authority.decode())
    load_certificate(made, credentials)
    if side == "server":
        made.num_tickets = 0
        made.sslobject_class = _Outspoken
    return made


_context = functools.lru_cache(maxsize=16)(new_context)


def peer_member(transport: Any) -> Member | None:
    """Return the peer of a transport; None without TLS. Raises NotTrusted."""
    certificate = transport.get_extra_info("peercert")
    if certificate is None:
        return None
    for kind, value in certificate.get("subjectAltName", ()):
        uri = urlsplit(value)
        role, _, name = uri.path.removeprefix("/").partition("/")
        if kind == "URI" and uri.scheme == "servekit" and role in _ROLES:
            return Member(unquote(uri.netloc), _ROLES[role], unquote(name))
    raise NotTrusted("the certificate of the other side names no member")


_ROLES: dict[str, Role] = {"supervisor": "supervisor", "gateway": "gateway", "worker": "worker"}


def explain_failure(error: ssl.SSLError) -> str:
    """Explain in a sentence why a connection failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = f"its certificate is refused: {error.verify_message}"
        return f"the other side is not trusted: {_VERDICTS.get(error.verify_code, said)}"
    reason = error.reason or str(error)
    for word, sentence in _REASONS.items():
        if word in reason:
            return sentence
    return f"TLS failed: {reason.replace('_', ' ').lower()}"


def check_clock(credentials: Credentials, now: float) -> None:
    """Check the dates of the certificate. Raises StartError, with a sentence."""
    early_s = credentials.not_before + SKEW_S - now
    if early_s > SKEW_S:
        raise StartError(
            f"the clock of this machine is {early_s:.0f} s behind that of the supervisor's, and"
            f" more than {SKEW_S:.0f} s are not allowed: set both (timedatectl, chrony)"
        )
    if now >= credentials.not_after:
        raise StartError(
            f"the certificate of {credentials.member} has expired {now - credentials.not_after:.0f}"
            " s ago by the clock of this machine, and was not renewed: set the clock (timedatectl)"
        )


def load_certificate(made: ssl.SSLContext, credentials: Credentials) -> None:
    """Load a certificate into a context, for connections from now on.

    OpenSSL reads keys from files only, so the key passes through anonymous memory.
    """
    fd = os.memfd_create("servekit", os.MFD_CLOEXEC)
    try:
        os.write(fd, credentials.certificate + credentials.key)
        made.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


class _Outspoken(ssl.SSLObject):
    """An SSLObject that logs refused clients, about which event loops are silent."""

    _told_at = -_TELL_EVERY_S

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            now = time.monotonic()
            if now - _Outspoken._told_at >= _TELL_EVERY_S:
                _Outspoken._told_at = now
                log.warning("connection_refused", reason=explain_failure(error))
            raise
