"""The language of a page: by its address, else by the visitor's preference.

The English pages are at /ui, the Chinese ones at /ui/zh. A visitor of an English address who
prefers Chinese, by an earlier choice (a cookie) or by the browser's settings, is redirected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from servekit.gateway.ui.pages.sentences_zh import translate_sentence
from servekit.gateway.ui.pages.texts_en import ENGLISH
from servekit.gateway.ui.pages.texts_zh import CHINESE

DEFAULT = "en"
PATH = "/ui"
#: The pages by address, in the order of the bar; the first is the chat.
PAGES = (
    *("", "compare", "playground", "embeddings", "structured", "transcribe"),
    *("dashboard", "requests", "operate"),
)
TABLES: Mapping[str, Mapping[str, str]] = {"en": ENGLISH, "zh": CHINESE}
#: The languages' own names.
NAMES = {"en": "English", "zh": "中文"}
COOKIE = "servekit-lang"


@dataclass(frozen=True, slots=True)
class Say:
    """The texts of one language: `say("queue.before", count=3)`."""

    language: str

    def __call__(self, key: str, **values: object) -> str:
        """Return the text of `key` with its fields filled in. Raises KeyError if unknown."""
        return TABLES[self.language][key].format(**values)

    def count(self, key: str, number: int) -> str:
        """Return the text of `key.one` or `key.many` for a number of things."""
        return self(f"{key}.{'one' if number == 1 else 'many'}", count=f"{number:,}")

    def translate(self, sentence: str) -> str:
        """Return what another process has said, in this language as far as it is known."""
        return translate_sentence(sentence) if self.language == "zh" else sentence

    def name_phase(self, phase: str) -> str:
        """Return the name of a phase of a load; an engine may have phases of its own."""
        return TABLES[self.language].get(f"phase.{phase}", phase)


SAY_ENGLISH = Say("en")


def get_root(language: str) -> str:
    """Return the address below which the pages of a language are."""
    return PATH if language == DEFAULT else f"{PATH}/{language}"


def get_preferred(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return a visitor's language by the request's headers: the cookie, else Accept-Language."""
    accepted = ""
    for name, value in headers:
        if name == b"cookie" and (chosen := _get_chosen(value.decode("latin-1"))):
            return chosen
        if name == b"accept-language":
            accepted = value.decode("latin-1")
    return _choose_best(accepted)


def _get_chosen(cookies: str) -> str:
    try:
        morsel = SimpleCookie(cookies).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None and morsel.value in TABLES else ""


def _choose_best(accepted: str) -> str:
    """Return our first language in Accept-Language by weight. Source: RFC 9110, 12.5.4."""
    weighed = [_weigh_entry(one) for one in accepted.split(",")[:32]]
    ours = [(weight, language) for weight, language in weighed if language in TABLES and weight > 0]
    return max(ours, key=lambda one: one[0])[1] if ours else DEFAULT


def _weigh_entry(entry: str) -> tuple[float, str]:
    tag, _, parameter = entry.strip().partition(";")
    language = tag.strip().lower().partition("-")[0]
    _, is_weighed, weight = parameter.partition("q=")
    try:
        return (float(weight) if is_weighed else 1.0), language
    except ValueError:
        return 0.0, language
