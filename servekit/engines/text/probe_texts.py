"""Texts on which libraries for tokenizing are compared, before one is used instead of another."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Sequence

#: Code points that a text of one script is taken from, and of which every seventh is in it.
_BLOCK = 256
#: Added tokens tried one by one; others are tried in a sample.
_ADDED = 300
_ODD = [
    "",
    " ",
    "  leading and trailing  ",
    "\n\n\n \t\t  \r\n \r a\u00a0b\u3000c\u2028d\u2029e\x85f\x0bg\x0ch",
    "\ufeffbyte order mark\ufeff",
    "nul \x00 and \x1b[0m escapes \x7f \x01",
    "zero\u200bwidth\u200djoiner\u200cs \u2060 \ufffd \ufffe \uffff \ue000",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 \U0001f600\U0001f600 ☺️ 1️⃣",
    "e\u0301 é ﬁ ① ½ İ ı ß ẞ ǅ ſ K Å ẛ̣ ﷺ 각 가 क्षि ｆｕｌｌ ﾊﾝｶｸ",
    "I'm you're HE'LL they'VE it'S ’s don't'd",
    "1 12 123 1234 12345 123456789 1,234.5 ٣٤٥ १२३ ²³ Ⅷ 0x1F 1e-9 3.14159",
    "def f(x):\n    return {'a': [1, 2], **x}  # why\n\n\tif (a!=b) && c->d || e::f<T>();\n",
    "<html><body class=\"a\">&amp;</body></html> ```python\nprint('hi')\n``` $x^2$ \\frac{a}{b}",
    "▁▁ Ġ Ċ ĉ Â <0x0A> <0xFF> [UNK] [CLS] ## ##ing </s><s> <unk> <|im_start|> <|endoftext|>",
    "https://example.org/a_b?c=d&e=%20#f user@example.org C:\\dir\\file.txt",
    "中文没有空格，日本語テキスト。한국어 띄어쓰기 ไทยไม่มีช่องว่าง ខ្មែរ မြန်မာ བོད་ אבג עִבְרִית العربيّة",
]


def make_probe_texts(added: Sequence[str]) -> Iterator[str]:
    """Yield the same odd texts each time, and texts with the added tokens."""
    yield from _ODD
    yield from _scripts()
    yield from _long_texts()
    yield from _texts_in_turns()
    yield from _random_texts()
    yield from _texts_with(added)


def _scripts() -> Iterator[str]:
    """Yield a sample of each script's characters, in words and without spaces."""
    for start in range(0, 0x20000, _BLOCK):
        sample = (chr(start + at) for at in range(0, _BLOCK, 7))
        known = [one for one in sample if unicodedata.category(one) not in ("Cn", "Cs", "Co")]
        if known:
            yield "".join(known) + " " + " ".join(known[::3])


def _long_texts() -> Iterator[str]:
    for one in ("a", "é", "中", " ", "7", "=", "\n", "ab"):
        yield one * 997
    words = [word for text in _ODD for word in text.split()]
    yield " ".join(random.Random(1).choices(words, k=5000))


def _texts_in_turns() -> Iterator[str]:
    """Yield texts with the same beginning, as later turns of a chat have it.

    A library that keeps the splits of the last text must not keep one that the next letter decides:
    fastokens 0.3.2 does after white space, from 4 KiB on.
    """
    beginning = "and so on, " * 400 + " " * 99
    for end in ("x", " ", "x", "\tx"):
        yield beginning + end


def _random_texts() -> Iterator[str]:
    source = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZéßñ"
    pieces = [*" \n\t.,;:!?'\"-_()[]{}/\\|@#%&*+=<>~^$0123456789中🙂\u0301", "  ", "\r\n"]
    for _ in range(200):
        count = source.randint(1, 12)
        words = ("".join(source.choices(letters, k=source.randint(1, 9))) for _ in range(count))
        yield "".join(word + source.choice(pieces) for word in words)


def _texts_with(added: Sequence[str]) -> Iterator[str]:
    tried = list(added)
    if len(tried) > _ADDED:
        tried = random.Random(3).sample(tried, _ADDED)
    for token in tried:
        yield f"{token}a {token} b{token}c  {token}\n\n {token}{token}1{token[:-1]} {token.upper()}"
    for at in range(0, len(tried), 8):
        yield "x ".join(tried[at : at + 8]) + "".join(tried[at : at + 8])
