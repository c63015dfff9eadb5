"""The pages' texts: the same in both languages, all of them used, and who gets which."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

import pytest

from servekit.gateway.ui import pages
from servekit.gateway.ui.pages.language import PAGES, TABLES, Say, get_preferred

FOLDER = Path(pages.__file__).parent
SOURCES = [*FOLDER.glob("*.py"), *FOLDER.parent.glob("ui*.py")]


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_both_tables_have_the_same_keys_and_fields() -> None:
    english, chinese = TABLES["en"], TABLES["zh"]
    assert set(english) == set(chinese)
    assert [key for key in english if fields(english[key]) != fields(chinese[key])] == []


def test_chinese_texts_are_chinese() -> None:
    """What is the same in both is a name, or an example in English."""
    same = {key for key, text in TABLES["zh"].items() if text == TABLES["en"][key]}
    assert same == {"top_p", "top_k", "playground.example"}
    han = re.compile(r"[\u4e00-\u9fff]")
    assert [
        key for key, text in TABLES["zh"].items() if key not in same and not han.search(text)
    ] == []


def test_every_text_is_used_and_every_key_exists() -> None:
    """Keys stand in the sources as they are, or as f-strings that end or begin with a name."""
    said: set[str] = set()
    patterns: list[re.Pattern[str]] = []
    for path in SOURCES:
        if path.stem.startswith("texts_"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    re.escape(str(v.value)) if isinstance(v, ast.Constant) else r"[\w.-]+"
                    for v in node.values
                ]
                patterns.append(re.compile("".join(parts)))

    def is_used(key: str) -> bool:
        stem = re.sub(r"\.(one|many)$", "", key)
        return bool({key, stem} & said) or any(
            p.fullmatch(key) for p in patterns if "." in p.pattern
        )

    assert [key for key in TABLES["en"] if not is_used(key)] == []


def test_keys_of_states_and_pages_exist() -> None:
    from typing import get_args

    from servekit.protocol.adapters import AdapterState
    from servekit.protocol.residency import Residency
    from servekit.protocol.types import WorkerState

    say = Say("zh")
    for kind, names in (("state", WorkerState), ("tier", Residency), ("adapter", AdapterState)):
        assert all(say(f"{kind}.{name}") for name in get_args(names))
    assert all(say(f"nav.{page or 'chat'}") for page in PAGES)


def test_counts_have_a_singular() -> None:
    assert Say("en").count("token", 1) == "1 token"
    assert Say("en").count("token", 1234) == "1,234 tokens"
    with pytest.raises(KeyError):
        Say("en")("no such key")


@pytest.mark.parametrize(
    ("headers", "language"),
    [
        ({}, "en"),
        ({"accept-language": "zh-CN,zh;q=0.9,en;q=0.8"}, "zh"),
        ({"accept-language": "en-GB,en;q=0.9,zh;q=0.8"}, "en"),
        ({"accept-language": "fr,zh;q=0.2,en;q=0.1"}, "zh"),
        ({"accept-language": "de-DE"}, "en"),
        ({"accept-language": "zh;q=0"}, "en"),
        ({"accept-language": "zh;q=x,;,,=;q="}, "en"),
        ({"accept-language": "zh", "cookie": "a=b; servekit-lang=en"}, "en"),
        ({"accept-language": "en", "cookie": "servekit-lang=zh"}, "zh"),
        ({"accept-language": "zh", "cookie": "servekit-lang=xx"}, "zh"),
        ({"accept-language": "en", "cookie": '"\\;;=,servekit-lang'}, "en"),
    ],
)  # fmt: skip
def test_the_browser_and_then_the_switch_choose(headers: dict[str, str], language: str) -> None:
    assert get_preferred((k.encode(), v.encode()) for k, v in headers.items()) == language
