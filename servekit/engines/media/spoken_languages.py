"""The languages that Whisper models know, by code and by English name.

Source: LANGUAGES and TO_LANGUAGE_CODE of OpenAI's whisper/tokenizer.py, as transformers has them,
whose import takes seconds.
"""

from __future__ import annotations

from collections.abc import Collection

from servekit.errors import RequestError

_LANGUAGES = """
en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese,
pt portuguese, tr turkish, pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian,
id indonesian, hi hindi, fi finnish, vi vietnamese, he hebrew, uk ukrainian, el greek, ms malay,
cs czech, ro romanian, da danish, hu hungarian, ta tamil, no norwegian, th thai, ur urdu,
hr croatian, bg bulgarian, lt lithuanian, la latin, mi maori, ml malayalam, cy welsh, sk slovak,
te telugu, fa persian, lv latvian, bn bengali, sr serbian, az azerbaijani, sl slovenian, kn kannada,
et estonian, mk macedonian, br breton, eu basque, is icelandic, hy armenian, ne nepali,
mn mongolian, bs bosnian, kk kazakh, sq albanian, sw swahili, gl galician, mr marathi, pa punjabi,
si sinhala, km khmer, sn shona, yo yoruba, so somali, af afrikaans, oc occitan, ka georgian,
be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao, uz uzbek,
fo faroese, ht haitian creole, ps pashto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit,
lb luxembourgish, my myanmar, bo tibetan, tl tagalog, mg malagasy, as assamese, tt tatar,
haw hawaiian, ln lingala, ha hausa, ba bashkir, jw javanese, su sundanese, yue cantonese
"""
_OTHER_NAMES = """
my burmese, ca valencian, nl flemish, ht haitian, lb letzeburgesch, ps pushto, pa panjabi,
ro moldavian, ro moldovan, si sinhalese, es castilian, zh mandarin
"""


def _read_pairs(text: str) -> list[tuple[str, str]]:
    pairs = (" ".join(pair.split()).partition(" ") for pair in text.split(","))
    return [(code, name) for code, _, name in pairs]


#: Names of languages by code, and codes by name.
NAMES: dict[str, str] = dict(_read_pairs(_LANGUAGES))
CODES: dict[str, str] = {
    name: code for code, name in _read_pairs(_LANGUAGES) + _read_pairs(_OTHER_NAMES)
}


def find_language(asked: str, known: Collection[str]) -> str:
    """Return the code of a language given by its name or code, which has to be among `known`.

    Raises RequestError.
    """
    code = CODES.get(asked.lower(), asked.lower())
    if code not in known:
        some = ", ".join(sorted(known)[:100])
        raise RequestError(
            f"language: this model does not know {asked[:40]!r}; it knows {some}",
            param="language",
        )
    return code
