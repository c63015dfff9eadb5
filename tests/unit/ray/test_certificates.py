"""When a certificate is renewed."""

from __future__ import annotations

import time

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from servekit.protocol.transport.certificate_authority import LIFE_S, SKEW_S, Authority
from servekit.ray.certificates import Certificates, is_fresh

OURS = Authority.new("c")
HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("age_s", "fresh"),
    [
        (0.0, True),
        (LIFE_S * 0.6, True),
        (LIFE_S * 0.7, False),
        (LIFE_S * 1.5, False),
        (-SKEW_S / 2, True),
        # the clock that it was issued by was an hour ahead: to others it is not valid yet
        (-HOUR_S, False),
    ],
)
def test_a_certificate_is_renewed_after_two_thirds_of_its_life(age_s: float, fresh: bool) -> None:
    issued = OURS.issue("worker", "m/0")
    assert is_fresh(issued, time.time() + age_s) is fresh


def test_each_is_renewed_by_itself() -> None:
    certificates = Certificates(OURS, life_s=HOUR_S)
    mine = certificates.own.credentials
    certificates.issue("worker", "m/0")
    certificates.renew_due()
    assert certificates.own.credentials is mine
    assert certificates.due("worker", "m/0") is None
    found = certificates.due("worker", "m/1")  # an earlier supervisor has started it
    assert found is not None and (found.role, found.member) == ("worker", "m/1")
    assert certificates.due("worker", "m/1") is None
    certificates.forget_certificate("worker", "m/1")
    assert certificates.due("worker", "m/1") is not None


def test_what_is_dialled_stays_so() -> None:
    certificates = Certificates(OURS, life_s=0.0)
    server = ExtendedKeyUsageOID.SERVER_AUTH
    for is_dialled in (True, False):
        certificates.issue("gateway", "gateway/n", is_dialled=is_dialled)
        found = certificates.due("gateway", "gateway/n", is_dialled=is_dialled)
        assert found is not None
        shown = x509.load_pem_x509_certificate(found.certificate)
        usage = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (server in usage) is is_dialled


def test_our_own_is_renewed_where_it_is_used() -> None:
    certificates = Certificates(OURS, life_s=0.0)  # over as soon as it is made
    own, before = certificates.own, certificates.own.credentials
    certificates.renew_due()
    assert own is certificates.own and own.credentials != before


def test_an_authority_outlives_all_it_issues() -> None:
    issued = OURS.issue("worker", "m/0", life_s=100 * 365 * 86400.0)
    assert issued.not_after > time.time() + 99 * 365 * 86400.0
