"""Certificates that an instance has issued, and their renewal.

An instance may run for longer than its certificates are valid. Each is replaced after two thirds of
its life, over the control connection of its process; the rest allows for clocks that differ and for
workers that are out of reach for a while.
"""

from __future__ import annotations

import time

from servekit.protocol.transport.certificate_authority import SKEW_S, Authority
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.credentials import Credentials, Role

#: Fraction of a certificate's life after which it is renewed.
_RENEWED_AFTER = 2 / 3


class Certificates:
    """Certificates of one instance. `own` is the supervisor's, for all of its connections."""

    def __init__(self, authority: Authority, life_s: float) -> None:
        self.authority = authority
        self._life_s = life_s
        self._issued: dict[tuple[Role, str], Credentials] = {}
        self.own = CertificateHolder(self.issue("supervisor", "supervisor"))

    def issue(self, role: Role, member: str, *, is_dialled: bool = False) -> Credentials:
        """Issue a certificate for a process that is about to start."""
        issued = self.authority.issue(role, member, life_s=self._life_s, is_dialled=is_dialled)
        self._issued[role, member] = issued
        return issued

    def due(self, role: Role, member: str, *, is_dialled: bool = False) -> Credentials | None:
        """Return a new certificate if the current one is due for renewal, else None.

        The certificate of a process that an earlier supervisor started is unknown, and renewed at
        once.
        """
        issued = self._issued.get((role, member))
        fresh = issued is not None and is_fresh(issued, time.time())
        return None if fresh else self.issue(role, member, is_dialled=is_dialled)

    def forget_certificate(self, role: Role, member: str) -> None:
        """Forget a certificate, which makes it due."""
        self._issued.pop((role, member), None)

    def renew_due(self) -> None:
        """Renew the supervisor's own certificate if it is due."""
        if (due := self.due("supervisor", "supervisor")) is not None:
            self.own.renew(due)


def is_fresh(credentials: Credentials, now: float) -> bool:
    """Return whether a certificate is not due at that Unix time, nor from the future.

    The latter happens if the clock was set back.
    """
    begin = credentials.not_before + SKEW_S
    life_s = credentials.not_after - begin
    return credentials.not_before <= now < begin + _RENEWED_AFTER * life_s
