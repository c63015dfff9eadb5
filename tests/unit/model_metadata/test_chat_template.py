"""Chat templates run in a sandbox, by the rules of transformers."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import jinja2
import pytest

from servekit.model_metadata.chat_template import compile_template, syntax_error


def render(source: str, **variables: Any) -> str:
    return compile_template(source).render(**variables)


# ---------------------------------------------------------------- what parses


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("{{ messages }}", 0, ""),
        ("", 0, ""),
        ("{% for m in messages %}{% break %}{% endfor %}", 0, ""),
        ("{% generation %}x{% endgeneration %}", 0, ""),
        ("\n{{ a }", 2, "unexpected '}'"),
        ("a\nb\n{% nosuch %}", 3, "Encountered unknown tag 'nosuch'"),
        ("{% generation %}x", 1, "Unexpected end of template."),
        ("{% if a %}\n", 1, "Unexpected end of template."),
        ("{{ a | nosuch }}", 1, "No filter named 'nosuch'"),
    ],
)
def test_a_template_that_does_not_parse_is_told_with_its_line(
    source: str, line: int, reason: str
) -> None:
    at, said = syntax_error(source)
    assert at == line
    assert said.startswith(reason.rstrip(".")) and bool(said) == bool(reason)
    assert not said.endswith(".")


def test_a_template_that_is_nested_too_deep_is_told() -> None:
    assert syntax_error("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}") == (
        1,
        "it is nested too deep",
    )


# ---------------------------------------------------------------- what it may do


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in ms %}\n  {% if m %}\n{{ m }}\n  {% endif %}\n{% endfor %}\nend"
    assert render(source, ms=["a", "b"]) == "a\nb\nend"


def test_loops_may_be_left() -> None:
    source = "{% for n in ns %}{% if n == 2 %}{% continue %}{% elif n == 4 %}{% break %}{% endif %}"
    assert render(source + "{{ n }}{% endfor %}", ns=[1, 2, 3, 4, 5]) == "13"


def test_what_the_model_itself_has_written_is_marked_without_effect() -> None:
    source = "{% set x = 1 %}a{% generation %}{% set x = 2 %}b{{ x }}{% endgeneration %}c{{ x }}"
    assert render(source) == "ab2c1"


def test_json_is_plain_and_keeps_the_order_of_keys() -> None:
    value = {"b": "<é&'>", "a": [1, None, True]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<é&\'>", "a": [1, null, true]}'


def test_json_takes_the_arguments_of_transformers() -> None:
    value = {"b": "é", "a": 1}
    assert render("{{ v | tojson(ensure_ascii=true) }}", v=value) == '{"b": "\\u00e9", "a": 1}'
    assert render("{{ v | tojson(indent=1) }}", v=value) == '{\n "b": "é",\n "a": 1\n}'
    assert render("{{ v | tojson(separators=(',', ':')) }}", v=value) == '{"b":"é","a":1}'
    assert render("{{ v | tojson(sort_keys=true) }}", v=value) == '{"a": 1, "b": "é"}'


def test_a_template_may_refuse_a_conversation_in_its_own_words() -> None:
    with pytest.raises(jinja2.TemplateError, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_may_tell_the_date() -> None:
    shown = render("{{ strftime_now('%Y-%m-%d') }}")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", shown)
    assert abs((datetime.now() - datetime.strptime(shown, "%Y-%m-%d")).days) <= 1


def test_a_variable_may_be_set_within_a_loop_by_a_namespace() -> None:
    source = "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}"
    assert render(source + "{% endfor %}{{ ns.n }}") == "3"


# ---------------------------------------------------------------- what it may not do


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% set ns = namespace() %}{% set ns._Namespace__attrs = 1 %}",
        "{{ range(100000000) }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    messages = [1]
    with pytest.raises((jinja2.exceptions.SecurityError, jinja2.UndefinedError, OverflowError)):
        render(source, messages=messages)
    assert messages == [1]


def test_the_attribute_that_it_may_not_set_is_named() -> None:
    with pytest.raises(jinja2.exceptions.SecurityError, match="cannot set the attribute '_x'"):
        render("{% set ns = namespace() %}{% set ns._x = 1 %}")
