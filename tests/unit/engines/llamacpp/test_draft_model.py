"""A draft model: whether it may draft for another, and what its end frees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from servekit.engines.llamacpp.draft_model import Draft, check_draft
from servekit.errors import LoadError


def make_vocabulary(*pieces: bytes) -> Any:
    return SimpleNamespace(size=len(pieces), piece=pieces.__getitem__)


def make_draft(*pieces: bytes, rewinds: bool = True) -> Any:
    return SimpleNamespace(rewinds=rewinds, vocabulary=make_vocabulary(*pieces))


def test_a_closed_draft_frees_its_context_before_its_model() -> None:
    closed: list[str] = []

    def make_part(name: str) -> Any:
        return SimpleNamespace(close=lambda: closed.append(name))

    parts = make_part("model"), make_part("context")
    Draft(*parts, own_context=8).close()
    assert closed == ["context", "model"]


def test_a_draft_has_the_models_vocabulary_though_padded() -> None:
    vocabulary = make_vocabulary(b"a", b"b", b"", b"")
    check_draft(make_draft(b"a", b"b"), vocabulary, "small")
    check_draft(make_draft(b"a", b"b", b"", b"", b""), vocabulary, "small")


def test_another_vocabulary_is_told_with_how_many_tokens_differ() -> None:
    vocabulary = make_vocabulary(b"a", b"b", b"c")
    for pieces, differing in (
        ((b"a", b"b"), 1),
        ((b"a", b"b", b"d"), 1),
        ((b"b", b"a", b"c", b"d"), 3),
    ):
        with pytest.raises(LoadError) as error:
            check_draft(make_draft(*pieces), vocabulary, "small")
        said = f"its vocabulary is not the model's, {differing} tokens differ."
        assert error.value.args[0] == f"small cannot draft: {said}"


def test_a_recurrent_model_cannot_draft() -> None:
    with pytest.raises(LoadError, match="small cannot draft: it is recurrent"):
        check_draft(make_draft(b"a", rewinds=False), make_vocabulary(b"a"), "small")
