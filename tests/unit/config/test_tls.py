"""Certificates that can be served with, and the sentences about those that cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.config.tls import check_certificate
from tests.integration.certificates import make


def test_a_good_pair_is_good(tmp_path: Path) -> None:
    check_certificate(*make(tmp_path))


@pytest.mark.parametrize(
    ("days", "said"), [((-30, -1), "has expired"), ((1, 30), "is not valid yet")]
)
def test_dates(tmp_path: Path, days: tuple[int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_certificate(*make(tmp_path, days=days))


def test_the_key_of_another(tmp_path: Path) -> None:
    certificate, _ = make(tmp_path)
    _, key = make(tmp_path, "other")
    with pytest.raises(ValueError, match=r"other\.key is not the key of .*server\.pem"):
        check_certificate(certificate, key)


def test_a_passphrase_is_not_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has a passphrase"):
        check_certificate(*make(tmp_path, passphrase="secret"))


def test_files_that_are_none(tmp_path: Path) -> None:
    certificate, key = make(tmp_path)
    (tmp_path / "empty").write_text("nothing")
    with pytest.raises(ValueError, match="missing: does not exist"):
        check_certificate(tmp_path / "missing", key)
    with pytest.raises(ValueError, match=r"empty is not a private key in PEM form"):
        check_certificate(certificate, tmp_path / "empty")
    os.mkfifo(tmp_path / "fifo")
    for pair in ((tmp_path / "fifo", key), (certificate, tmp_path / "fifo")):
        with pytest.raises(ValueError, match="fifo is not a regular file"):
            check_certificate(*pair)
    with pytest.raises(ValueError, match=r"cannot be used: .*PEM"):
        check_certificate(key, certificate)
