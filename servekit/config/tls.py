"""A check of a TLS certificate by an in-memory handshake with itself."""

from __future__ import annotations

import ssl
from pathlib import Path

#: OpenSSL's verify codes; source: x509_vfy.h.
_NOT_YET_VALID, _EXPIRED = 9, 10


def check_certificate(certificate: Path, key: Path) -> None:
    """Raise ValueError with a sentence unless a server can use these two PEM files now."""
    for path, what in ((certificate, "certificate"), (key, "private key")):
        _check_pem(path, what)
    server = _server_context(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # trust the certificate itself, whoever signed it: the check is for its dates
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cafile=str(certificate))
    try:
        _shake_hands(client, server)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"{certificate}: {_explain_error(error)}") from None
    except ssl.SSLError as error:
        raise ValueError(f"{certificate}: no client can connect with it: {error.reason}") from None


def _check_pem(path: Path, what: str) -> None:
    try:
        if path.exists() and not path.is_file():  # a pipe's reader waits for ever
            raise ValueError(f"{path} is not a regular file")
        text = path.read_bytes()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(f"{path}: {reason}") from None
    if b"-----BEGIN " not in text:
        raise ValueError(f"{path} is not a {what} in PEM form")


def _server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asked = False

    def password() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(certificate, key, password)
    except (ssl.SSLError, OSError, ValueError) as error:
        if asked:
            raise ValueError(
                f"{key} has a passphrase, which servekit cannot ask for: remove it with"
                " `openssl pkey`"
            ) from None
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key} is not the key of {certificate}") from None
        said = getattr(error, "reason", None) or error
        raise ValueError(f"{certificate} and {key} cannot be used: {said}") from None
    return context


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Shake hands in memory; raises the client's verification error."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    done = 0
    while done < len(ends):
        done = 0
        for end in ends:
            try:
                end.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                continue


def _explain_error(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "the certificate has expired"
    if error.verify_code == _NOT_YET_VALID:
        return "the certificate is not valid yet; is this machine's clock right?"
    return f"clients will refuse the certificate: {error.verify_message}"
