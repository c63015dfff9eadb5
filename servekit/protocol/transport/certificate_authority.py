"""The authority of one cluster: made when it starts, gone when it ends, known to nobody else.

Each member gets a certificate that says in a URI which cluster it is of, in which role, and by
which name; who may talk to whom is decided by that, not by host names (`tls`). Needs the package
`cryptography`, of the extra `servekit[cluster]`, on the machine where certificates are made.
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

#: A member's certificate is good for so long, and is renewed well before that is over.
LIFE_S = 30 * 86400.0
#: Clocks of two nodes may differ by so much.
SKEW_S = 300.0
#: The authority's own has no end, it goes with its cluster; as RFC 5280 (4.1.2.5) writes that.
NO_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class Authority(msgspec.Struct, frozen=True):
    """Whose word all members of one cluster trust."""

    cluster: str
    certificate: bytes  # PEM
    key: bytes  # PEM

    def __repr__(self) -> str:
        return f"Authority({self.cluster})"

    @classmethod
    def new(cls, name: str) -> Authority:
        """An authority of its own for a cluster of that name, which others may have as well.

        Raises StartError where `cryptography` is not installed.
        """
        _need_cryptography()
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        cluster = f"{name}-{secrets.token_hex(4)}"
        subject = _name(f"servekit {cluster}")
        begin = time.time() - SKEW_S
        builder = _begun(subject, subject, key.public_key(), begin, NO_END.timestamp())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(signs=True), True)
        return cls(cluster, _signed(builder, key), _pem(key))

    def issue(
        self, role: Role, member: str, *, life_s: float = LIFE_S, is_dialled: bool = False
    ) -> Credentials:
        """Credentials for one process. Supervisors and gateways dial, workers are dialled.

        And so are gateways on other machines than the supervisor's: `is_dialled`.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        issuer = x509.load_pem_x509_certificate(self.certificate)
        own: Any = serialization.load_pem_private_key(self.key, None)
        key = ec.generate_private_key(ec.SECP256R1())
        begin, end = (now := time.time()) - SKEW_S, now + life_s
        builder = _begun(_name(member[:64]), issuer.subject, key.public_key(), begin, end)
        uri = f"servekit://{quote(self.cluster, '')}/{role}/{quote(member, '')}"
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        builder = builder.add_extension(names, False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_usage(signs=False), True)
        # a worker dials itself, too, to see that it can be reached
        client = ExtendedKeyUsageOID.CLIENT_AUTH
        server = [ExtendedKeyUsageOID.SERVER_AUTH] if is_dialled or role == "worker" else []
        builder = builder.add_extension(x509.ExtendedKeyUsage([client, *server]), True)
        parent = x509.AuthorityKeyIdentifier.from_issuer_public_key(own.public_key())
        builder = builder.add_extension(parent, False)
        signed = _signed(builder, own)
        return Credentials(
            self.cluster, role, member, self.certificate, signed, _pem(key), begin, end
        )

    def to_bytes(self) -> bytes:
        """To be kept in secret, for a supervisor that comes after this one."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Authority:
        """Raises StartError for what `to_bytes` has not made."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise StartError(f"this is no authority of servekit: {error}") from None


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise StartError(
            "workers on other machines need certificates, and the package that makes them is not"
            " installed here: pip install 'servekit[cluster]'"
        ) from None


def _name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _begun(
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


def _usage(*, signs: bool) -> x509.KeyUsage:
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


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
