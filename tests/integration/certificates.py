"""Certificates for tests, made on the spot: self-signed, for localhost and addresses of ours."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)


def make(
    folder: Path,
    name: str = "server",
    *,
    days: tuple[int, int] = (-1, 30),
    passphrase: str = "",
    addresses: Sequence[str] = ("127.0.0.1",),
) -> tuple[Path, Path]:
    """Write NAME.pem and NAME.key, valid from and until so many days from now; their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
        .add_extension(x509.SubjectAlternativeName([*names, x509.DNSName("localhost")]), False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    sealed: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        sealed = serialization.BestAvailableEncryption(passphrase.encode())
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(pem, pkcs8, sealed))
    return paths
