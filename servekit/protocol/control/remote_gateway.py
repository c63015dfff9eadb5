"""Messages of a gateway on another machine, beside those of every gateway.

    supervisor → gateway   CertificateUpdate · AdminResponse
    gateway → supervisor   AdminRequest

Such a gateway has neither the files of the supervisor's machine nor the operators' socket, so its
control channel carries both. These messages are fleeting: none is sent again.
"""

from __future__ import annotations

from servekit.protocol.base import Message
from servekit.protocol.messages import FromGateway, FromSupervisor, ToGateway, ToSupervisor


class CertificateUpdate(Message, frozen=True):
    """The certificate for HTTPS on new connections."""

    stamp: str  # as in AccessRules
    certificate: bytes  # PEM
    key: bytes  # PEM


class AdminRequest(Message, frozen=True):
    """A question of an operator that arrived over HTTP."""

    id: int
    question: ToSupervisor


class AdminResponse(Message, frozen=True):
    id: int
    answer: FromSupervisor


ToRemoteGateway = ToGateway | CertificateUpdate | AdminResponse
FromRemoteGateway = FromGateway | AdminRequest
