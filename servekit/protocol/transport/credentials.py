"""What a member of a cluster shows to the others, and how it comes to have it.

Credentials are made by `authority.Authority` where the supervisor is, and handed to a process
through a descriptor that it inherits, `read`: neither in its command line nor in its environment,
where `ps` and /proc/PID/environ would show them, and not in a file, which somebody else may read
and nobody removes. Only the standard library is needed to use them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from servekit.errors import StartError
from servekit.protocol.base import Message

Role = Literal["supervisor", "gateway", "worker"]

#: Longest credentials read: three short PEMs.
_MAX_BYTES = 64 * 2**10


class Credentials(msgspec.Struct, frozen=True):
    """The certificate of one member, its key, and that of the authority which all trust."""

    cluster: str
    role: Role
    member: str
    authority: bytes  # PEM
    certificate: bytes  # PEM
    key: bytes  # PEM, PKCS 8, not encrypted
    not_before: float  # Unix time, s
    not_after: float

    def __repr__(self) -> str:
        return f"Credentials({self.cluster}, {self.role}, {self.member})"  # the key is no one's

    def to_bytes(self) -> bytes:
        """To be handed over in secret."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Credentials:
        """Raises StartError for what `to_bytes` has not made."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise StartError(f"these are no credentials of servekit: {error}") from None

    def hand_over(self) -> int:
        """A descriptor to be inherited, from which a process `read`s them; the caller closes it.

        It is memory without a name: nothing of it is on any disk.
        """
        fd = os.memfd_create("servekit", 0)  # inherited by who is told of it in `pass_fds`
        os.write(fd, self.to_bytes())
        return fd


class Renew(Message, frozen=True):
    """Show these from now on: to a worker by its supervisor's connection, and to gateways."""

    credentials: Credentials


def read(fd: int) -> Credentials:
    """Take credentials from an inherited descriptor, a pipe or `hand_over`'s, and close it.

    What can be wiped is: another process that inherited it by mistake finds nothing. Raises
    StartError.
    """
    with os.fdopen(fd, "r+b" if _can_be_wiped(fd) else "rb", buffering=0) as source:
        if source.seekable():
            source.seek(0)
        data = b""
        while len(data) <= _MAX_BYTES and (more := source.read(_MAX_BYTES)):
            data += more
        if source.writable():
            source.truncate(0)
    return Credentials.from_bytes(data)


def _can_be_wiped(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").readlink().name.startswith("memfd:")
