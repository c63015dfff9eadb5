"""The certificate authority of one cluster: made at its start, private to it, gone at its end.

Each member gets a certificate with a URI that states its cluster, role and name; these decide who
may talk to whom, not host names (`tls`). Needs the package `cryptography`, of the extra
`servekit[cluster]`, on the machine where certificates are made.
"""

from __future__ import annotations

import datetime
import secrets
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from servekit.errors import StartError
from servekit.protocol.transport.credentials import Credentials, Role

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

#: Lifetime of a member's certificate, which is renewed well before its end.
LIFE_S = 30 * 86400.0
#: Maximum difference between the clocks of two nodes.
SKEW_S = 300.0
#: "No expiry" by RFC 5280 (4.1.2.5): the authority's own certificate lives as long as its cluster.
NO_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class Authority(msgspec.Struct, frozen=True):
    """The certificate authority that all members of one cluster trust."""

    cluster: str
    certificate: bytes  # PEM
    key: bytes  # PEM

    def __repr__(self) -> str:
        return f"Authority({self.cluster})"

    @classmethod
    def new(cls, name: str) -> Authority:
        """Return a new authority for a cluster of that name; the name need not be unique.

        Raises StartError where `cryptography` is not installed.
        """
        _need_cryptography()
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        cluster = f"{name}-{secrets.token_hex(4)}"
        subject = _common_name(f"servekit {cluster}")
        begin = time.time() - SKEW_S
        builder = _begin_certificate(subject, subject, key.public_key(), begin, NO_END.timestamp())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_key_usage(signs=True), True)
        return cls(cluster, _sign_certificate(builder, key), _key_pem(key))

    def issue(
        self, role: Role, member: str, *, life_s: float = LIFE_S, is_dialled: bool = False
    ) -> Credentials:
        """Issue credentials for one process. Supervisors and gateways dial, workers are dialled.

        `is_dialled` is for gateways on other machines than the supervisor's, which are dialled,
        too.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        issuer = x509.load_pem_x509_certificate(self.certificate)
        own: Any = serialization.load_pem_private_key(self.key, None)
        key = ec.generate_private_key(ec.SECP256R1())
        begin, end = (now := time.time()) - SKEW_S, now + life_s
        builder = _begin_certificate(
            _common_name(member[:64]), issuer.subject, key.public_key(), begin, end
        )
        uri = f"servekit://{quote(self.cluster, '')}/{role}/{quote(member, '')}"
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        builder = builder.add_extension(names, False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_key_usage(signs=False), True)
        # a worker also dials itself, to verify that it can be reached
        client = ExtendedKeyUsageOID.CLIENT_AUTH
        server = [ExtendedKeyUsageOID.SERVER_AUTH] if is_dialled or role == "worker" else []
        builder = builder.add_extension(x509.ExtendedKeyUsage([client, *server]), True)
        parent = x509.AuthorityKeyIdentifier.from_issuer_public_key(own.public_key())
        builder = builder.add_extension(parent, False)
        signed = _sign_certificate(builder, own)
        return Credentials(
            self.cluster, role, member, self.certificate, signed, _key_pem(key), begin, end
        )

    def to_bytes(self) -> bytes:
        """Serialize the authority, including its secret key, for a successor supervisor."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Authority:
        """Restore an authority from `to_bytes`. Raises StartError for any other data."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise StartError(f"this is not a certificate authority of servekit: {error}") from None


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise StartError(
            "workers on other machines need certificates, and the package that makes them is not"
            " installed here: pip install cryptography"
        ) from None


def _common_name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _begin_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: float, end: float
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.fromtimestamp(begin, datetime.UTC))
        .not_valid_after(datetime.datetime.fromtimestamp(end, datetime.UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sign_certificate(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
