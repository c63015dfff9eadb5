"""The table of languages is the library's."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.whisper import tokenization_whisper

from servekit.engines.media.spoken_languages import CODES, NAMES, find_language
from servekit.errors import RequestError

library: Any = tokenization_whisper


def test_languages_are_the_librarys() -> None:
    assert list(NAMES.items()) == list(library.LANGUAGES.items())
    assert CODES == library.TO_LANGUAGE_CODE


def test_a_language_has_a_code_and_names() -> None:
    for asked in ("ht", "HT", "haitian", "Haitian Creole"):
        assert find_language(asked, {"en", "ht"}) == "ht"
    with pytest.raises(RequestError, match=r"does not know 'german'; it knows en, ht") as refused:
        find_language("german", {"en", "ht"})
    assert refused.value.param == "language"
