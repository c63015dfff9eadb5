"""Every message survives the wire, and newer peers may add fields."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from servekit.protocol import messages
from servekit.protocol.control.remote_gateway import (
    AdminRequest,
    AdminResponse,
    CertificateUpdate,
    FromRemoteGateway,
    ToRemoteGateway,
)
from servekit.protocol.messages import (
    Delta,
    DeltaBatch,
    FromGateway,
    FromSupervisor,
    FromWorker,
    GatewayToWorker,
    GetWhy,
    Load,
    ModelInfo,
    Ready,
    Refused,
    ToGateway,
    TokenBatch,
    ToSupervisor,
    ToWorker,
    WorkerSpec,
    WorkerToGateway,
)

UNIONS: list[Any] = [
    ToWorker,
    FromWorker,
    ToGateway,
    FromGateway,
    GatewayToWorker,
    WorkerToGateway,
    ToSupervisor,
    FromSupervisor,
]
#: With what is said of a gateway on another machine.
REMOTE: list[Any] = [ToRemoteGateway, FromRemoteGateway]
SPEC = WorkerSpec(
    "m/0", "m", "echo", "p", None, "cpu", "auto", None, False, {"top_p": 0.5}, {"a": [1]}, "/s"
)
INFO = ModelInfo(10, 1, True, "a", "float32", "cpu")


@pytest.mark.parametrize(
    ("union", "message"),
    [
        (ToWorker, Load(SPEC)),
        (FromWorker, Ready(INFO, {"load": 1.5})),
        (WorkerToGateway, TokenBatch([1, 7], ["hé", ""], [5, 6])),
        (FromRemoteGateway, AdminRequest(1, GetWhy("m/0"))),
        (ToRemoteGateway, AdminResponse(1, Refused("no", True))),
        (ToRemoteGateway, CertificateUpdate("s", b"c", b"k")),
        (WorkerToGateway, DeltaBatch([Delta(1, "hé", [5, 6], "stop", 2, 3), Delta(2, "")])),
    ],
)
def test_round_trip(union: Any, message: Any) -> None:
    decoder = msgspec.msgpack.Decoder(union)
    assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_every_union_decodes_every_member_and_nothing_else() -> None:
    for union in UNIONS + REMOTE:
        decoder = msgspec.msgpack.Decoder(union)
        for member in get_args(union):
            tag = member.__struct_config__.tag
            with pytest.raises(msgspec.ValidationError):
                decoder.decode(msgspec.msgpack.encode(["Nonsense" + tag]))


def test_a_newer_peer_may_add_fields() -> None:
    decoder = msgspec.msgpack.Decoder(ToWorker)
    assert decoder.decode(msgspec.msgpack.encode(["Ping", 4, "from the future"])) == messages.Ping(
        4
    )


def test_every_message_is_in_the_drawing() -> None:
    assert messages.__doc__ is not None
    for union in UNIONS:
        for member in get_args(union):
            assert member.__name__ in messages.__doc__
