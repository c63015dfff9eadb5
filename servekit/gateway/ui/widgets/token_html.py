"""Tokens with their probabilities as HTML: by colour, by underline, and in words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.answer_html import clean_text
from servekit.protocol.messages import TokenLogprob

#: The lowest probability of each level; at level 0 the model was sure.
LEVELS = (0.9, 0.6, 0.3, 0.1, 0.0)
#: The most characters shown of one token: some vocabularies have very long ones.
MOST_CHARS = 80


def get_level(probability: float) -> int:
    """Return the level of a probability, 0 to 4; less probable tokens have higher levels."""
    return next(at for at, least in enumerate(LEVELS) if probability >= least)


def get_probability(logprob: float) -> float:
    """Return the probability of a logarithm; engines may report one slightly above 0."""
    return min(1.0, math.exp(min(0.0, logprob)))


def format_percent(probability: float) -> str:
    """Return a percentage, short enough for a tooltip."""
    share = 100 * probability
    if 0 < share < 0.1:
        return "< 0.1 %"
    return f"{share:.0f} %" if share >= 99.95 or share == 0 else f"{share:.1f} %"


def show_token(token: bytes) -> str:
    """Return a token's readable text, with visible line ends; it may be a part of a character."""
    text = token.decode(errors="replace")[:MOST_CHARS]
    text = text.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥")
    return clean_text(text) or "∅"


def render_spans(prompt: str, tokens: Sequence[TokenLogprob], say: Say) -> str:
    """Return the prompt and its completion, token by token. The last element stays open."""
    label = escape(say("tokens.label"))
    before = f'<span class="sk-said">{escape(clean_text(prompt), quote=False)}</span>'
    marks = "".join(_render_span(at, one, say) for at, one in enumerate(tokens))
    return f'<div class="sk-tokens" role="group" aria-label="{label}">{before}{marks}'


def _render_span(at: int, one: TokenLogprob, say: Say) -> str:
    chance, text = get_probability(one.logprob), show_token(one.token)
    best = [(show_token(token), get_probability(logprob)) for token, logprob in one.best]
    rest = [(word, share) for word, share in best if word != text]
    others = ", ".join(f"{word} {format_percent(share)}" for word, share in rest) or say(
        "tokens.none"
    )
    label = say("tokens.one", token=text, percent=format_percent(chance), others=others)
    rows = [[text, format_percent(chance), chance, True]]
    rows += [[word, format_percent(share), share, False] for word, share in rest]
    ends = "\n" if one.token.endswith(b"\n") else ""
    return (
        f'<span class="sk-token sk-p{get_level(chance)}" role="button" '
        f'tabindex="{-1 if at else 0}" aria-label="{escape(label)}" '
        f'data-rows="{escape(json.dumps(rows))}">'
        f"{escape(_show_blanks(one.token, text))}</span>{ends}"
    )


def _show_blanks(token: bytes, text: str) -> str:
    """Return blanks as visible signs, so that a token of blanks alone can be pointed at."""
    return text.replace(" ", "␣") if token.strip() == b"" else text


def render_legend(say: Say) -> str:
    """Return the legend of the colours and underlines."""
    names = (*(f"≥ {100 * least:.0f} %" for least in LEVELS[:-1]), f"< {100 * LEVELS[-2]:.0f} %")
    marks = "".join(
        f'<li><span class="sk-token sk-p{at}">abc</span> {name}</li>'
        for at, name in enumerate(names)
    )
    detail = escape(say("tokens.point"))
    head = "".join(
        f' data-{name}="{escape(say(f"tokens.{name}"))}"' for name in ("token", "chance", "chosen")
    )
    return (
        f'<ul class="sk-legend" aria-label="{escape(say("tokens.legend"))}">{marks}</ul>'
        f'<div class="sk-detail" aria-live="polite"{head}><p class="sk-quiet">{detail}</p></div>'
    )


def summarize_tokens(tokens: Sequence[TokenLogprob], say: Say) -> str:
    """Return a sentence on the model's confidence over all tokens."""
    if not tokens:
        return ""
    mean = sum(min(0.0, one.logprob) for one in tokens) / len(tokens)
    perplexity, least = math.exp(min(-mean, 700.0)), min(tokens, key=lambda one: one.logprob)
    return say(
        "tokens.summary",
        perplexity=f"{perplexity:.2f}",
        token=show_token(least.token),
        percent=format_percent(get_probability(least.logprob)),
    )
