"""The identity of a process in its cluster, through all renewals of its certificate.

A certificate is replaced well before it expires, over the process's control channel (`Renew`). The
new one holds for new connections; existing connections keep the identity that was verified when
they were made.
"""

from __future__ import annotations

import ssl
import time
from typing import Any, Literal

import structlog

from servekit.errors import WireError
from servekit.protocol.transport import tls
from servekit.protocol.transport.credentials import Credentials

log: Any = structlog.get_logger("servekit.protocol")


class CertificateHolder:
    """The current credentials of a member. Used on one event loop, or in one thread."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._server: ssl.SSLContext | None = None

    @property
    def member(self) -> str:
        return self.credentials.member

    def context(self, side: Literal["client", "server"]) -> ssl.SSLContext:
        """Return the TLS context; a server always gets the same one, which follows renewals.

        Raises StartError where the certificate is not valid by this machine's clock.
        """
        tls.check_clock(self.credentials, time.time())
        if side == "client":
            return tls.tls_context(self.credentials, side)
        if self._server is None:
            self._server = tls.new_context(self.credentials, side)
        return self._server

    def renew(self, fresh: Credentials) -> None:
        """Replace the credentials. Raises WireError for those of another member."""
        own = self.credentials
        if (fresh.authority, fresh.role, fresh.member) != (own.authority, own.role, own.member):
            raise WireError(f"{own} cannot be renewed by {fresh}")
        if self._server is not None:
            tls.load_certificate(self._server, fresh)
        self.credentials = fresh
        log.info("certificate_renewed", valid_for_s=round(fresh.not_after - time.time()))
