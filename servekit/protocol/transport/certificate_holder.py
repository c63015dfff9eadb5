"""Who a process is to the others of its cluster, through all renewals of its certificate.

A certificate is replaced well before it expires, over the control line of the process that has it
(`Renew`). The new one counts for connections that begin from then on; those that stand are of
whoever was verified when they began, and go on.
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
    """The credentials that a member has at the moment. On one event loop, or in one thread."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._server: ssl.SSLContext | None = None

    @property
    def member(self) -> str:
        return self.credentials.member

    def context(self, side: Literal["client", "server"]) -> ssl.SSLContext:
        """How it takes part in TLS: of a server the same one always, which follows renewals.

        Raises StartError where its certificate is not valid by the clock here.
        """
        tls.check_clock(self.credentials, time.time())
        if side == "client":
            return tls.context(self.credentials, side)
        if self._server is None:
            self._server = tls.new_context(self.credentials, side)
        return self._server

    def renew(self, fresh: Credentials) -> None:
        """Raises WireError for those of somebody else."""
        own = self.credentials
        if (fresh.authority, fresh.role, fresh.member) != (own.authority, own.role, own.member):
            raise WireError(f"{own} cannot be renewed by {fresh}")
        if self._server is not None:
            tls.load(self._server, fresh)
        self.credentials = fresh
        log.info("certificate renewed", good_for_s=round(fresh.not_after - time.time()))
