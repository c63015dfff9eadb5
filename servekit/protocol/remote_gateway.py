"""What a gateway on another machine is told and tells beside what every gateway is.

    supervisor → gateway   Certified · Answered
    gateway → supervisor   Asked

It has neither the files of the supervisor's machine nor its operators' socket: what it takes of
these goes by its control channel. All of it is about the moment, and nothing is sent again.
"""

from __future__ import annotations

from servekit.protocol.base import Message
from servekit.protocol.messages import FromGateway, FromSupervisor, ToGateway, ToSupervisor


class CertificateUpdate(Message, frozen=True):
    """Serve HTTPS with that, for new connections."""

    stamp: str  # as in AccessRules
    certificate: bytes  # PEM
    key: bytes  # PEM


class AdminRequest(Message, frozen=True):
    """A question of an operator's, who has asked over HTTP."""

    id: int
    question: ToSupervisor


class AdminResponse(Message, frozen=True):
    id: int
    answer: FromSupervisor


ToRemoteGateway = ToGateway | CertificateUpdate | AdminResponse
FromRemoteGateway = FromGateway | AdminRequest
