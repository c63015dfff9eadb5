"""TLS of the public socket, with a certificate that can be renewed without a restart."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import structlog

log: Any = structlog.get_logger("servekit.gateway")


class Tls:
    """A TLS context for a certificate and its key; a renewal applies to new connections."""

    def __init__(self, files: tuple[Path, Path] | None) -> None:
        self._files = files  # None: on another machine; their content comes by `load_from_memory`
        self._stamp = ""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    def renew(self, stamp: str) -> None:
        """Read the files, unless those with this stamp have been read already."""
        if stamp != self._stamp and self._files is not None:
            self._load(stamp, *self._files)

    def load_from_memory(self, stamp: str, pem: bytes) -> None:
        """Load a certificate and its key from memory."""
        fd = os.memfd_create("servekit", os.MFD_CLOEXEC)  # OpenSSL reads keys from files only
        try:
            os.write(fd, pem)
            self._load(stamp, Path(f"/proc/self/fd/{fd}"), None)
        finally:
            os.close(fd)

    def _load(self, stamp: str, certificate: Path, key: Path | None) -> None:
        try:
            self.context.load_cert_chain(certificate, key, _no_password)
        except (OSError, ValueError) as error:  # although the supervisor has just checked them
            log.error("certificate_unreadable", reason=str(error))
            return
        self._stamp = stamp


def _no_password() -> str:
    raise ValueError("the key has a passphrase")
