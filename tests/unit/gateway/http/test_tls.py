"""A certificate that a gateway is handed, in want of the files."""

from __future__ import annotations

import ssl
import warnings
from pathlib import Path

import pytest
import structlog

from servekit.gateway.http.tls import Tls
from tests.integration.certificates import make


def shown(server: ssl.SSLContext, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """The certificate that a client of that version is shown."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        client.minimum_version = client.maximum_version = version
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(down, up)
    answers = server.wrap_bio(up, down, server_side=True)
    waiting = [asks, answers]
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
    return asks.getpeercert(binary_form=True) or b""


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ],
)
def test_clients_older_than_tls_1_2_are_refused(
    tmp_path: Path, version: ssl.TLSVersion, is_taken: bool
) -> None:
    certificate, key = make(tmp_path)
    tls = Tls(None)
    tls.load_from_memory("1", certificate.read_bytes() + key.read_bytes())
    tls.context.set_ciphers("ALL:@SECLEVEL=0")  # it is not the ciphers that refuse
    if is_taken:
        assert shown(tls.context, version) == der(certificate)
        return
    with pytest.raises(ssl.SSLError, match=r"PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL"):
        shown(tls.context, version)


def test_what_is_handed_is_shown_and_so_is_what_comes_after(tmp_path: Path) -> None:
    tls = Tls(None)
    for name in ("first", "second"):
        certificate, key = make(tmp_path, name)
        tls.load_from_memory(name, certificate.read_bytes() + key.read_bytes())
        tls.renew(name)  # there are no files to be read
        assert shown(tls.context) == der(certificate)


def test_what_cannot_be_used_leaves_the_old_one(tmp_path: Path) -> None:
    certificate, key = make(tmp_path)
    tls = Tls(None)
    tls.load_from_memory("1", certificate.read_bytes() + key.read_bytes())
    with structlog.testing.capture_logs() as logs:
        tls.load_from_memory("2", b"nonsense")
    assert logs[0]["event"] == "certificate_unreadable"
    assert shown(tls.context) == der(certificate)
