"""The certificates that an instance has issued, and which of them are to be renewed by now.

An instance may run for longer than any certificate lives. Each is replaced after two thirds of its
life, over the control line of the process that has it; what is left is for clocks that disagree,
and for a worker that is out of reach for a while.
"""

from __future__ import annotations

import time

from servekit.protocol.transport.certificate_authority import SKEW_S, Authority
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.credentials import Credentials, Role

#: Of a certificate's life, before it is renewed.
_RENEWED_AFTER = 2 / 3


class Certificates:
    """Of one instance. `own` is the supervisor's, for all of its connections."""

    def __init__(self, authority: Authority, life_s: float) -> None:
        self.authority = authority
        self._life_s = life_s
        self._issued: dict[tuple[Role, str], Credentials] = {}
        self.own = CertificateHolder(self.issue("supervisor", "supervisor"))

    def issue(self, role: Role, member: str, *, is_dialled: bool = False) -> Credentials:
        """For a process that is about to start."""
        issued = self.authority.issue(role, member, life_s=self._life_s, is_dialled=is_dialled)
        self._issued[role, member] = issued
        return issued

    def due(self, role: Role, member: str, *, is_dialled: bool = False) -> Credentials | None:
        """What a process is to have instead of what it has; None where that is good for longer.

        One that an earlier supervisor has started may have any: it is renewed at once.
        """
        issued = self._issued.get((role, member))
        fresh = issued is not None and is_fresh(issued, time.time())
        return None if fresh else self.issue(role, member, is_dialled=is_dialled)

    def forget(self, role: Role, member: str) -> None:
        """Which it has is not known: it is due."""
        self._issued.pop((role, member), None)

    def look(self) -> None:
        """Renew our own where that is due."""
        if (due := self.due("supervisor", "supervisor")) is not None:
            self.own.renew(due)


def is_fresh(credentials: Credentials, now: float) -> bool:
    """Not yet to be renewed, at that Unix time; nor issued by a clock that has been set back."""
    begin = credentials.not_before + SKEW_S
    life_s = credentials.not_after - begin
    return credentials.not_before <= now < begin + _RENEWED_AFTER * life_s
