"""Credentials of a cluster member, and their secret transfer to a new process.

`certificate_authority.Authority` makes them on the supervisor's machine. A process gets them
through
an inherited descriptor (`read_credentials`): not in its command line or environment, which `ps` and
/proc/PID/environ would show, and not in a file, which others may read and nobody removes. Using
them takes only the standard library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from servekit.errors import StartError
from servekit.protocol.base import Message

Role = Literal["supervisor", "gateway", "worker"]

#: Maximum length of credentials: three short PEMs.
_MAX_BYTES = 64 * 2**10


class Credentials(msgspec.Struct, frozen=True):
    """The certificate and key of one member, and the certificate of the common authority."""

    cluster: str
    role: Role
    member: str
    authority: bytes  # PEM
    certificate: bytes  # PEM
    key: bytes  # PEM, PKCS 8, not encrypted
    not_before: float  # Unix time, s
    not_after: float

    def __repr__(self) -> str:
        return f"Credentials({self.cluster}, {self.role}, {self.member})"  # without the secret key

    def to_bytes(self) -> bytes:
        """Serialize the credentials, including the secret key."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Credentials:
        """Restore credentials from `to_bytes`. Raises StartError for any other data."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise StartError(f"these are not credentials of servekit: {error}") from None

    def hand_over(self) -> int:
        """Return an inheritable descriptor for `read_credentials`; the caller closes it.

        It is anonymous memory: nothing is written to a disk.
        """
        fd = os.memfd_create("servekit", 0)  # inherited by children that get it in `pass_fds`
        os.write(fd, self.to_bytes())
        return fd


class Renew(Message, frozen=True):
    """New credentials for a worker or gateway to use from now on."""

    credentials: Credentials


def read_credentials(fd: int) -> Credentials:
    """Read credentials from an inherited descriptor (a pipe, or from `hand_over`), and close it.

    Memory is wiped, so that another process that inherited it by mistake finds nothing. Raises
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
