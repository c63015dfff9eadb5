"""Structured output: it keeps to the grammar, and nobody else notices."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits

from servekit.engines.text.structured_output import MAX_BYTES, Grammars, mask_words
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Grammar
from tests.unit.engines.harness import (
    PROMPTS,
    Harness,
    assert_alive,
    assert_dead_end_is_its_own,
    byte_level_tokenizer,
)
from tests.unit.engines.transformers.test_engine_loop import TOKEN_BYTES

Make = Callable[..., Harness]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DIGITS = Grammar("regex", "[0-9]{3}")
JSON = Grammar("json_schema", json.dumps(SCHEMA))
#: On a machine that is busy with others; what explodes takes minutes.
WITHIN_S = 60.0
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 4, "presence_penalty": 0.5}


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_regular_expression_is_kept_to(either: Harness, params: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        job = either.submit(prompt, grammar=DIGITS, max_tokens=40, **params)
        assert re.fullmatch("[0-9]{3}", either.text(job))
        assert either.finish(job) == "stop"
    assert_alive(either)


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept_to(either: Harness, seed: int) -> None:
    job = either.submit(
        PROMPTS[0], grammar=JSON, max_tokens=400, temperature=1.5, seed=seed, ignore_eos=bool(seed)
    )
    jsonschema.validate(json.loads(either.text(job)), SCHEMA)
    assert either.finish(job) == "stop"


def test_a_lark_grammar_is_kept_to(either: Harness) -> None:
    grammar = Grammar("lark", 'start: "yes" | "no" | "maybe " start')
    job = either.submit(PROMPTS[0], grammar=grammar, max_tokens=200, temperature=1.0, seed=1)
    assert re.fullmatch("(maybe )*(yes|no)", either.text(job))


def test_any_json_may_come(either: Harness) -> None:
    grammar = Grammar("json_schema", '{"type": "object"}')
    job = either.submit(PROMPTS[0], grammar=grammar, max_tokens=400, temperature=0.7, seed=7)
    text = either.text(job)
    assert text.startswith("{")
    if either.finish(job) == "stop":
        assert isinstance(json.loads(text), dict)


def test_the_limit_cuts_it_off(either: Harness) -> None:
    job = either.submit(PROMPTS[0], grammar=Grammar("regex", "[a-z]{50}"), max_tokens=4)
    assert len(either.tokens(job)) == 4
    assert either.finish(job) == "length"
    exactly = either.submit(PROMPTS[0], grammar=Grammar("regex", "a"), max_tokens=1)
    assert (either.text(exactly), either.finish(exactly)) == ("a", "stop")


def test_the_end_waits_for_min_tokens_as_long_as_the_grammar_can(either: Harness) -> None:
    digits = Grammar("regex", "[0-9]+")
    job = either.submit(PROMPTS[3], grammar=digits, max_tokens=60, min_tokens=30)
    assert len(either.tokens(job)) >= 30
    more = Grammar("regex", "a( b( c)?)?")
    longest = either.submit(PROMPTS[3], grammar=more, max_tokens=60, min_tokens=50)
    assert (either.text(longest), either.finish(longest)) == ("a b c", "stop")
    never = either.submit(PROMPTS[3], grammar=digits, max_tokens=60, ignore_eos=True)
    assert (len(either.tokens(never)), either.finish(never)) == (60, "length")
    must = either.submit(PROMPTS[3], grammar=DIGITS, max_tokens=60, min_tokens=30)
    assert (len(either.text(must)), either.finish(must)) == (3, "stop")


@pytest.mark.lane("long")
def test_a_row_with_a_grammar_leaves_the_others_their_text(either: Harness) -> None:
    plain: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    alone = [either.generate(prompt, **plain) for prompt in PROMPTS]
    bound_alone = either.generate(PROMPTS[1], grammar=JSON, max_tokens=100, **SAMPLED)
    jobs = [either.submit(prompt, **plain) for prompt in PROMPTS]
    bound = either.submit(PROMPTS[1], grammar=JSON, max_tokens=100, **SAMPLED)
    other = either.submit(PROMPTS[1], grammar=DIGITS, max_tokens=100)
    assert [either.tokens(job) for job in jobs] == alone
    assert either.tokens(bound) == bound_alone
    assert len(either.text(other)) == 3


@pytest.mark.lane("long")
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_continuing_at_every_token_gives_the_undisturbed_text(
    either: Harness, params: dict[str, Any]
) -> None:
    asked = params | {"grammar": JSON, "max_tokens": 40, "logprobs": 2}
    first = either.submit(PROMPTS[0], **asked)
    whole, noted = either.tokens(first), either.logprobs(first)
    jobs = [either.submit(PROMPTS[0], whole[:cut], **asked) for cut in range(len(whole) + 1)]
    for cut, job in enumerate(jobs):
        assert either.tokens(job) == whole[cut:]
        assert either.finish(job) == either.finish(first)
        rest = either.logprobs(job)
        assert [one.token for one in rest] == [one.token for one in noted[cut:]]
        assert [one.logprob for one in rest] == pytest.approx(
            [one.logprob for one in noted[cut:]], abs=1e-4
        )


def test_what_a_grammar_has_ended_leaves_no_blocks_behind(harness: Make) -> None:
    """The library does not know of that end: it is told of a cancellation. Here are 18 blocks."""
    one = harness(options={"kv_cache_bytes": 288 * TOKEN_BYTES, "block_size": 16})
    jobs = [one.submit(PROMPTS[n % 5], grammar=DIGITS, max_tokens=40) for n in range(60)]
    assert all(len(one.text(job)) == 3 for job in jobs)
    one.until_idle()
    runner = one.engine._runner
    assert isinstance(runner, ContinuousRunner)
    assert not runner._processor.scheduler.active_requests
    assert len(one.generate([5] * 200, max_tokens=40, ignore_eos=True)) == 40


def test_tokens_that_break_the_grammar_cannot_be_gone_on_from(tiny: Harness) -> None:
    with pytest.raises(RequestError, match="match the grammar"):
        tiny.submit(PROMPTS[0], tiny.engine.codec.encode("12x"), grammar=DIGITS)
    assert_alive(tiny)


# ---------------------------------------------------------------- what cannot be compiled


def chain(count: int, link: Callable[[str], Any]) -> str:
    """Definitions that each use the next one twice."""
    definitions: dict[str, Any] = {
        f"d{number}": link(f"#/$defs/d{number + 1}") for number in range(count)
    }
    return json.dumps({"$defs": definitions | {f"d{count}": False}, "$ref": "#/$defs/d0"})


REFUSED = [
    ("json_schema", "no json"),
    ("json_schema", "[1]"),
    ("json_schema", "false"),
    ("json_schema", '{"type": "nonsense"}'),
    ("json_schema", '{"not": {}}'),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"$ref": "#/$defs/missing"}'),
    ("json_schema", '{"$ref": "https://example.org/schema.json"}'),
    (
        "json_schema",
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
    ),
    ("json_schema", '{"allOf": [{"$ref": "#"}, {"type": "object"}]}'),
    ("json_schema", '{"type": "string", "pattern": "("}'),
    ("json_schema", '{"a":' * 3000 + "1" + "}" * 3000),
    ("json_schema", json.dumps({"type": "string", "const": "x" * MAX_BYTES})),
    ("json_schema", chain(40, lambda target: {"allOf": [{"$ref": target}, {"$ref": target}]})),
    ("regex", "(a"),
    ("regex", "(?=a)b"),
    ("regex", "(" * 5000 + "a" + ")" * 5000),
    ("lark", "start: foo"),
    ("lark", "nothing"),
    ("lark", ""),
]


@pytest.mark.parametrize(("kind", "text"), REFUSED, ids=lambda value: value[:40])
def test_what_cannot_be_compiled_is_refused_with_a_reason(
    tiny: Harness, kind: Any, text: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError) as caught:
        tiny.submit(PROMPTS[0], grammar=Grammar(kind, text))
    assert time.monotonic() - began < WITHIN_S
    assert caught.value.param == "response_format"
    assert re.match(
        r"The (JSON schema|regular expression|grammar) cannot be used: \w", str(caught.value)
    )
    assert "\n" not in str(caught.value) and "non-verbose" not in str(caught.value)
    assert len(str(caught.value)) < 400


EXPLOSIVE = [
    ("regex", "a{100000000}"),
    ("regex", "a{1000}{1000}{1000}"),
    ("regex", "(a|b)*a(a|b){2000}"),
    ("regex", "(.*a.{20}b){10}"),
    ("regex", "(x+x+)+y"),
    ("regex", r"\p{L}{1,100000}"),
    ("lark", 'start: start start | "a"'),
    ("lark", 's: s s s | "a" | ""\nstart: s'),
    ("json_schema", json.dumps({"type": "string", "minLength": 100_000, "maxLength": 10**7})),
    ("json_schema", json.dumps({"type": "string", "pattern": "^(.*a.{30}b){5}$"})),
    ("json_schema", json.dumps({"enum": [f"value{number}" for number in range(20_000)]})),
]


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value{number}" for number in range(10_000)]},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}},
        {"anyOf": [{"properties": {f"k{n}": {"type": "null"}}} for n in range(300)]},
    ],
)
def test_large_schemas_are_served(tiny: Harness, schema: dict[str, Any]) -> None:
    job = tiny.submit(PROMPTS[0], grammar=Grammar("json_schema", json.dumps(schema)), max_tokens=9)
    assert tiny.tokens(job)


@pytest.mark.parametrize(("kind", "text"), EXPLOSIVE, ids=lambda value: value[:40])
def test_what_explodes_is_refused_or_served_in_bounded_time(
    tiny: Harness, kind: Any, text: str
) -> None:
    """Sampled hot, so that the text goes wherever the grammar lets it."""
    began = time.monotonic()
    try:
        grammar = Grammar(kind, text)
        job = tiny.submit(PROMPTS[0], grammar=grammar, max_tokens=64, temperature=50.0, seed=1)
    except RequestError as error:
        assert error.param == "response_format"
    else:
        tiny.until(lambda: tiny.ended(job), "it has ended")
        last = tiny.outputs[job][-1]
        assert last.error is None or last.param == "response_format"
    assert time.monotonic() - began < WITHIN_S
    assert_alive(tiny)


def test_a_grammar_that_grows_too_complex_on_its_way_fails_its_own_request(either: Harness) -> None:
    job = assert_dead_end_is_its_own(either, max_tokens=128)
    assert any(output.token_ids for output in either.outputs[job]), "it had begun"
    either.until_idle()
    assert_alive(either)


def test_a_lexer_that_is_full_ends_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are those of all requests of the grammar, and one of them can fill it."""
    limits = LLParserLimits(max_lexer_states=3000, verbose_errors=False)
    monkeypatch.setattr("servekit.engines.text.structured_output.LIMITS", limits)
    grammars = Grammars(byte_level_tokenizer(), 400, frozenset({2}))
    grammar = Grammar("regex", "(a|b)*a(a|b){30}")
    chance = random.Random(1)
    mask = np.zeros(mask_words(grammars.vocab_size), np.int32)
    beside = [grammars.constraint(grammar) for _ in range(2)]
    renewed = 0
    for _ in range(1000):
        for constraint in beside:
            before = constraint._kept
            constraint.fill_mask(mask, avoid_end=True)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            constraint.accept_token(int(chance.choice(bits.nonzero()[0])))
            assert not constraint.failure
            renewed += constraint._kept is not before
    assert renewed >= 1
    late = grammars.constraint(grammar, beside[0]._taken)
    late.fill_mask(mask, avoid_end=True)
    assert not late.failure


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(byte_level_tokenizer(), 400, frozenset({2}))
    compiled: list[Grammar] = []
    compile_one = grammars._compile_tried

    def counted(grammar: Grammar, *, patient: bool) -> Any:
        compiled.append(grammar)
        return compile_one(grammar, patient=patient)

    monkeypatch.setattr(grammars, "_compile_tried", counted)
    first = grammars.constraint(DIGITS)
    first.accept_token(int(allowed(first)[0]))
    again = grammars.constraint(DIGITS)
    assert compiled == [DIGITS]
    assert len(allowed(again)) > len(allowed(first)), "a copy of its own, at the beginning"
    for number in range(100):
        grammars.constraint(Grammar("regex", f"{number}"))
    grammars.constraint(DIGITS)
    assert len(compiled) == 102, "the longest unused are let go"


def allowed(constraint: Any) -> list[int]:
    mask = np.zeros(mask_words(constraint.vocab_size), np.int32)
    constraint.fill_mask(mask, avoid_end=False)
    return [int(one) for one in np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]]


# ---------------------------------------------------------------- SmolLM2


@pytest.mark.lane("models")
@pytest.mark.model
def test_smollm2_answers_in_json(smol: Harness) -> None:
    question = ChatMessage("user", "Describe Anna, who is 32 and likes red, as JSON.")
    prompt = smol.engine.codec.render_chat([question])
    for params in ({}, SAMPLED):
        job = smol.submit(prompt, grammar=JSON, max_tokens=200, **params)
        jsonschema.validate(json.loads(smol.text(job)), SCHEMA)
        assert smol.finish(job) == "stop"


@pytest.mark.lane("models")
@pytest.mark.model
def test_smollm2_answers_in_three_digits(smol: Harness) -> None:
    job = smol.submit("One hundred and twenty-three is", grammar=DIGITS, max_tokens=10)
    assert re.fullmatch("[0-9]{3}", smol.text(job))
