"""The dates, names and uses of certificates, as another library reads them."""

from __future__ import annotations

import datetime
import time

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from servekit.errors import StartError, WireError
from servekit.protocol.transport import tls
from servekit.protocol.transport.certificate_authority import LIFE_S, SKEW_S, Authority
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.credentials import Role

OURS = Authority.new("c")


def since_now_s(date: datetime.datetime) -> float:
    return date.timestamp() - time.time()


def test_an_authority_is_valid_from_before_now_and_without_end() -> None:
    one = x509.load_pem_x509_certificate(Authority.new("c").certificate)
    assert -SKEW_S - 60 < since_now_s(one.not_valid_before_utc) <= 60 - SKEW_S
    assert one.not_valid_after_utc.year == 9999
    basic = one.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    usage = one.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign and not usage.digital_signature


def test_names_of_clusters_need_not_be_unique() -> None:
    assert Authority.new("c").cluster != OURS.cluster
    assert OURS.cluster.startswith("c-")
    assert repr(OURS) == f"Authority({OURS.cluster})", "without its key"


@pytest.mark.parametrize(
    ("role", "is_dialled", "serves"),
    [
        ("worker", False, True),
        ("gateway", False, False),
        ("gateway", True, True),
        ("supervisor", False, False),
    ],
)
def test_a_member_is_a_client_and_a_server_only_where_it_is_dialled(
    role: Role, is_dialled: bool, serves: bool
) -> None:
    issued = OURS.issue(role, "m/0", is_dialled=is_dialled)
    one = x509.load_pem_x509_certificate(issued.certificate)
    uses = one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert ExtendedKeyUsageOID.CLIENT_AUTH in uses
    assert (ExtendedKeyUsageOID.SERVER_AUTH in uses) is serves
    assert not one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert one.extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature


def test_a_member_is_named_and_dated() -> None:
    issued = OURS.issue("worker", "m/0")
    one = x509.load_pem_x509_certificate(issued.certificate)
    names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == [f"servekit://{OURS.cluster}/worker/m%2F0"]
    [common] = one.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert common.value == "m/0"
    assert -SKEW_S - 60 < since_now_s(one.not_valid_before_utc) <= 60 - SKEW_S
    assert LIFE_S - 60 < since_now_s(one.not_valid_after_utc) <= LIFE_S
    assert (issued.cluster, issued.role, issued.member) == (OURS.cluster, "worker", "m/0")
    assert abs(issued.not_after - one.not_valid_after_utc.timestamp()) < 1
    assert one.issuer == x509.load_pem_x509_certificate(OURS.certificate).subject


def test_a_successor_issues_with_the_same_key() -> None:
    again = Authority.from_bytes(OURS.to_bytes())
    assert again == OURS
    with pytest.raises(StartError, match="not a certificate authority of servekit"):
        Authority.from_bytes(b"x")


# ---------------------------------------------------------------- the holder


def test_an_expired_certificate_makes_no_context() -> None:
    holder = CertificateHolder(OURS.issue("worker", "m/0", life_s=-1.0))
    with pytest.raises(StartError, match="has expired"):
        holder.context("client")
    with pytest.raises(StartError, match="has expired"):
        holder.context("server")


def test_a_server_keeps_its_context_over_renewals_and_a_client_gets_new_ones() -> None:
    holder = CertificateHolder(OURS.issue("worker", "m/0"))
    server, client = holder.context("server"), holder.context("client")
    fresh = OURS.issue("worker", "m/0")
    holder.renew(fresh)
    assert holder.context("server") is server
    assert holder.context("client") is not client
    assert holder.credentials is fresh and holder.member == "m/0"


def test_nobody_becomes_another_member() -> None:
    own = OURS.issue("worker", "m/0")
    holder = CertificateHolder(own)
    others = [
        OURS.issue("worker", "m/1"),
        OURS.issue("gateway", "m/0"),
        Authority.new("c").issue("worker", "m/0"),
    ]
    for other in others:
        with pytest.raises(WireError, match="cannot be renewed by"):
            holder.renew(other)
    assert holder.credentials is own


@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [(-2 * SKEW_S - 60, "behind"), (-SKEW_S, ""), (SKEW_S, ""), (LIFE_S + 60, "has expired")],
)
def test_a_clock_may_differ_by_so_much(ahead_s: float, said: str) -> None:
    issued = OURS.issue("worker", "m/0")
    try:
        tls.check_clock(issued, time.time() + ahead_s)
    except StartError as error:
        assert said and said in error.message
    else:
        assert not said
