"""In which language a page speaks: its address says so, and else the visitor's browser.

The English pages are at /ui, the Chinese ones at /ui/zh. A visitor who comes to the English
address and prefers Chinese, by a choice made before (a cookie) or by the browser's settings, is
led to the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from servekit.gateway.ui.pages.texts_en import ENGLISH
from servekit.gateway.ui.pages.texts_zh import CHINESE

DEFAULT = "en"
PATH = "/ui"
#: The pages by their addresses, in the order of the bar; the first is the chat.
PAGES = ("", "compare", "playground", "embeddings", "structured", "dashboard", "operate")
TABLES: Mapping[str, Mapping[str, str]] = {"en": ENGLISH, "zh": CHINESE}
#: What each calls itself.
NAMES = {"en": "English", "zh": "中文"}
COOKIE = "servekit-lang"


@dataclass(frozen=True, slots=True)
class Say:
    """The texts of one language: `say("queue.before", count=3)`."""

    language: str

    def __call__(self, key: str, **values: object) -> str:
        """The text of `key`, with its fields filled in; raises KeyError for one there is not."""
        return TABLES[self.language][key].format(**values)

    def count(self, key: str, number: int) -> str:
        """As `say`, of a number of things: the text of `key.one` or `key.many`."""
        return self(f"{key}.{'one' if number == 1 else 'many'}", count=f"{number:,}")


SAY_ENGLISH = Say("en")


def root(language: str) -> str:
    """Where the pages of a language are."""
    return PATH if language == DEFAULT else f"{PATH}/{language}"


def preferred(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The language of a visitor, by the request's headers: the cookie, else Accept-Language."""
    accepted = ""
    for name, value in headers:
        if name == b"cookie" and (chosen := _chosen(value.decode("latin-1"))):
            return chosen
        if name == b"accept-language":
            accepted = value.decode("latin-1")
    return _best(accepted)


def _chosen(cookies: str) -> str:
    try:
        morsel = SimpleCookie(cookies).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None and morsel.value in TABLES else ""


def _best(accepted: str) -> str:
    """The first of ours in Accept-Language, by its weights; source: RFC 9110, 12.5.4."""
    weighed = [_weighed(one) for one in accepted.split(",")[:32]]
    ours = [(weight, language) for weight, language in weighed if language in TABLES and weight > 0]
    return max(ours, key=lambda one: one[0])[1] if ours else DEFAULT


def _weighed(entry: str) -> tuple[float, str]:
    tag, _, parameter = entry.strip().partition(";")
    language = tag.strip().lower().partition("-")[0]
    _, is_weighed, weight = parameter.partition("q=")
    try:
        return (float(weight) if is_weighed else 1.0), language
    except ValueError:
        return 0.0, language
