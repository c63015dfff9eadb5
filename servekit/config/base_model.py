"""The base class of all mappings in the configuration file: frozen, without unknown keys."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler

#: What a text has to be, in the words of a message, by the pattern that it has to match.
FORMS: dict[str, str] = {}


def require_form(pattern: str, form: str) -> Any:
    """Return the field of a text that matches `pattern`; `form` says what to write instead."""
    FORMS[pattern] = form
    return Field(pattern=pattern)


VariableName = Annotated[
    str,
    require_form(r"^[A-Za-z_][A-Za-z0-9_]*$", "the name of a variable: letters, digits and _"),
]


class Section(BaseModel):
    """A mapping of the file. The docstring below a field is its text for users."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in read_field_docs(cls).items():
            properties[name]["description"] = text
        return schema


@cache
def read_field_docs(section: type[Section]) -> dict[str, str]:
    """Return the docstrings of fields, by field; none where the source is missing.

    pydantic reads them as soon as it makes a class (`use_attribute_docstrings`), a tenth of a
    start, for which hardly any command has a use.
    """
    docs = {}
    for kind in reversed(section.__mro__[: section.__mro__.index(Section)]):
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, TypeError):
            continue
        assert isinstance(node, ast.ClassDef)
        for field, text in itertools.pairwise(node.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    docs[name] = inspect.cleandoc(doc)
    return docs
