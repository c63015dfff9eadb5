"""The text that users read of a field is the docstring below it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from servekit.config.base_model import Section, read_field_docs


class Base(Section):
    """A mapping with text."""

    first: int = 1
    """The first, over
    two lines."""
    bare: int = 2
    second: float = 3
    """The second."""


class Child(Base):
    """It has all that its base has, and more."""

    second: float = 4
    """The second, otherwise."""
    third: Path = Path()
    """The third."""


def test_each_field_with_a_docstring_has_its_text_and_those_of_the_base() -> None:
    assert read_field_docs(Base) == {
        "first": "The first, over\ntwo lines.",
        "second": "The second.",
    }
    assert read_field_docs(Child) == {
        "first": "The first, over\ntwo lines.",
        "second": "The second, otherwise.",
        "third": "The third.",
    }


def test_a_section_within_a_function_has_texts_too() -> None:
    class Inner(Section):
        one: int = 1
        """The one."""

    assert read_field_docs(Inner) == {"one": "The one."}


def test_a_section_whose_source_is_missing_has_no_texts() -> None:
    made: dict[str, type[Section]] = {}
    code = "class Made(Section):\n    one: int = 1\n    'The one.'\n"
    exec(code, {"Section": Section, "__name__": "nowhere"}, made)
    assert read_field_docs(made["Made"]) == {}


def test_the_schema_for_editors_has_the_texts() -> None:
    properties = Child.model_json_schema()["properties"]
    assert properties["third"]["description"] == "The third."
    assert "description" not in properties["bare"]


@pytest.mark.parametrize(
    ("written", "kind"),
    [({"frist": 1}, "extra_forbidden"), ({"second": float("nan")}, "finite_number")],
)
def test_unknown_keys_and_endless_numbers_are_refused(
    written: dict[str, object], kind: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Base.model_validate(written)
    assert caught.value.errors()[0]["type"] == kind


def test_a_section_cannot_be_changed() -> None:
    one = Base()
    with pytest.raises(ValidationError, match="frozen"):
        one.first = 2
