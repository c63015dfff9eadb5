"""Chat templates: jinja programs that come with a model, or with the configuration.

They run in jinja's sandbox, and see plain JSON values only. Names, filters and rules are those of
transformers 5. Jinja itself is imported lazily.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def compile_template(source: str) -> Template:
    """Return the template, ready to be rendered; raises jinja2.TemplateSyntaxError."""
    return _make_environment().from_string(source)


def syntax_error(source: str) -> tuple[int, str]:
    """Return the line, from 1, and the reason why `source` does not parse; (0, "") if it does."""
    import jinja2

    try:
        compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        return error.lineno, (error.message or "it does not parse").rstrip(".")
    except RecursionError:
        return 1, "it is nested too deep"
    return 0, ""


def _make_environment() -> Environment:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which marks the model's own text: it matters for training only."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """A namespace without attributes that begin with an underscore: they escape the sandbox."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(
                    f"a template cannot set the attribute {name!r}"
                )
            super().__setitem__(name, value)

    def refuse(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": Namespace,
    }
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
