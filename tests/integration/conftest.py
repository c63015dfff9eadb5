"""Fixtures of the tests in Chromium; each of their modules has an `instance` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.integration.instance import Instance


@pytest.fixture(scope="module")
def url(instance: Instance) -> str:
    return instance.url


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Browser]:
    from tests.integration.chromium import start_chromium  # most tests need no browser

    with start_chromium() as browser:
        yield browser
