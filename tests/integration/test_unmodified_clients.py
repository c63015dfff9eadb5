"""The clients of `python -m tests.clients`, one by one, as a lane."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from tests.clients.__main__ import CLIENTS, Client, describe, instance, parse, use

pytestmark = [pytest.mark.lane("clients"), pytest.mark.timeout(2400), pytest.mark.model]

Served = tuple[argparse.Namespace, dict[str, str]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    wish = parse([])
    with instance(wish) as (url, legacy):
        yield wish, describe(wish, url, legacy)


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_a_client_works_as_its_users_install_it(client: Client, served: Served) -> None:
    checks = use(client, *served)
    assert checks
    assert not [str(check) for check in checks if not check.passed]
