"""TLS of the public socket, with a certificate that can be renewed while connections stand."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import structlog

log: Any = structlog.get_logger("servekit.gateway")


class Tls:
    """A context for a certificate and its key; each renewal counts for new connections."""

    def __init__(self, files: tuple[Path, Path] | None) -> None:
        self._files = files  # None: they are on another machine, and it is handed what is in them
        self._stamp = ""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    def renew(self, stamp: str) -> None:
        """Read the files, unless they are those of this stamp, which have been read."""
        if stamp != self._stamp and self._files is not None:
            self._load(stamp, *self._files)

    def hand(self, stamp: str, pem: bytes) -> None:
        """Take a certificate and its key, from memory."""
        fd = os.memfd_create("servekit", os.MFD_CLOEXEC)  # OpenSSL reads keys from files only
        try:
            os.write(fd, pem)
            self._load(stamp, Path(f"/proc/self/fd/{fd}"), None)
        finally:
            os.close(fd)

    def _load(self, stamp: str, certificate: Path, key: Path | None) -> None:
        try:
            self.context.load_cert_chain(certificate, key, _no_password)
        except (OSError, ValueError) as error:  # the supervisor found them right a moment ago
            log.error("the certificate cannot be read; the old one goes on", reason=str(error))
            return
        self._stamp = stamp


def _no_password() -> str:
    raise ValueError("the key has a passphrase")
