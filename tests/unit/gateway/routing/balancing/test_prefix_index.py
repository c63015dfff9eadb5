"""Prompts in blocks, and who is known to hold them."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import takewhile
from typing import Any

import pytest

from servekit.gateway.routing.balancing.prefix_index import (
    BLOCK_CHARS,
    BLOCK_TOKENS,
    LEAST_BLOCKS,
    MOST_BLOCKS,
    Prefixes,
    Prompt,
    hash_prompt,
)
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import ChatMessage, SamplingParams, ToolCall

TEXT = "".join(f"{number:08d}" for number in range(1000))
SYSTEM = ChatMessage("system", TEXT[:1000])


def known(prompt: Any = None, messages: Any = None, **more: Any) -> Prompt:
    salt = more.pop("cache_salt", "")
    call = InflightRequest("m", SamplingParams(), prompt=prompt, messages=messages, more=more)
    call.cache_salt = salt
    return hash_prompt(call, head=True)


def shared(one: Prompt, other: Prompt) -> int:
    pairs = zip(one.blocks, other.blocks, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def test_a_prompt_is_cut_into_whole_blocks() -> None:
    prompt = known(TEXT[: 5 * BLOCK_CHARS + 17])
    assert (prompt.tokens, len(prompt.blocks)) == (5 * BLOCK_TOKENS + 4, 5)
    assert len(set(prompt.blocks)) == 5
    assert known(TEXT[: LEAST_BLOCKS * BLOCK_CHARS - 1]).blocks == ()
    assert len(known("x" * (MOST_BLOCKS + 9) * BLOCK_CHARS).blocks) == MOST_BLOCKS


def test_equal_blocks_at_other_places_are_others() -> None:
    prompt = known("x" * 4 * BLOCK_CHARS)
    assert len(set(prompt.blocks)) == 4


def test_prompts_share_what_they_begin_with() -> None:
    one = known(TEXT)
    for cut in (0, 100, BLOCK_CHARS, 5 * BLOCK_CHARS - 1, 5 * BLOCK_CHARS):
        other = known(TEXT[:cut] + "!" + TEXT[cut:])
        assert shared(one, other) == cut // BLOCK_CHARS


def test_token_ids_have_blocks_too() -> None:
    ids = list(range(10 * BLOCK_TOKENS + 5))
    prompt = known(ids)
    assert (prompt.tokens, len(prompt.blocks)) == (len(ids), 10)
    assert shared(prompt, known([*ids[: 3 * BLOCK_TOKENS], 7, *ids])) == 3
    assert known(ids[: LEAST_BLOCKS * BLOCK_TOKENS - 1]).blocks == ()


def test_a_conversation_goes_on_from_its_last_turn() -> None:
    first = [SYSTEM, user(TEXT[:300])]
    one = known(messages=first)
    later = known(messages=[*first, ChatMessage("assistant", "yes"), user(TEXT[:900])])
    assert shared(one, later) == len(one.blocks)
    assert one.head == later.head != known(messages=[SYSTEM, user("else " * 99)]).head


def test_the_end_of_a_message_does_not_change_its_beginning() -> None:
    one = known(messages=[user(TEXT[:2000] + " What is this?")])
    other = known(messages=[user(TEXT[:2000] + " Who wrote it, and when?")])
    assert shared(one, other) == len(one.blocks) == 2000 // BLOCK_CHARS


@pytest.mark.parametrize(
    "more",
    [
        {"adapter": "a"},
        {"adapter": "b"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"template": {"enable_thinking": False}},
        {"cache_salt": "alice"},
    ],
)
def test_what_is_before_the_messages_tells_prompts_apart(more: dict[str, Any]) -> None:
    for prompt in ({"prompt": TEXT}, {"messages": [user(TEXT)]}, {"prompt": list(range(900))}):
        plain, other, again = known(**prompt), known(**prompt, **more), known(**prompt, **more)
        assert shared(plain, other) == 0
        assert plain.head != other.head
        assert (again.blocks, again.head) == (other.blocks, other.head)


def test_what_a_message_holds_beside_its_text_tells_them_apart() -> None:
    call = ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),))
    other = ChatMessage("assistant", "", tool_calls=(ToolCall("1", "g", "{}"),))
    plain = ChatMessage("assistant", "")
    prompts = [known(messages=[user("a"), one, user(TEXT)]) for one in (call, other, plain)]
    assert len({prompt.blocks[0] for prompt in prompts}) == 3


def test_texts_to_embed_are_only_counted() -> None:
    prompt = known(task="embed", inputs=["x" * 4000, list(range(4000))])
    assert (prompt.tokens, prompt.blocks) == (2000, ())


def test_heads_are_the_same_in_every_process() -> None:
    code = (
        "from servekit.gateway.routing.request import InflightRequest\n"
        "from servekit.gateway.routing.balancing.prefix_index import hash_prompt\n"
        "from servekit.protocol.messages import SamplingParams\n"
        "params, prompt = SamplingParams(), 'abcdefgh' * 500\n"
        "call = InflightRequest('m', params, prompt=prompt, more={'adapter': 'a'})\n"
        "print(hash_prompt(call, head=True).head)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == known("abcdefgh" * 500, adapter="a").head


def test_the_longest_prefix_is_found() -> None:
    chain = list(range(100, 200))
    for count in range(101):
        prefixes = Prefixes()
        prefixes.add_prompt(chain[:count])
        assert prefixes.match(chain) == count
        assert prefixes.match(chain[:50]) == min(count, 50)
    assert Prefixes().match([]) == 0


def test_the_least_recently_used_goes_first_and_children_before_their_parents() -> None:
    chance = random.Random(5)
    prefixes = Prefixes(limit=300)
    roots = [[hash((root, at)) for at in range(50)] for root in range(20)]
    for _ in range(3000):
        chain = [*chance.choice(roots)[: chance.randint(1, 50)], chance.getrandbits(60)]
        prefixes.add_prompt(chain)
        assert prefixes.match(chain) == len(chain), "what was used last is there"
        assert len(prefixes) <= 300
        for other in roots:  # closed: nothing is held whose beginning is not
            found = [block in prefixes._held for block in other]
            assert found == sorted(found, reverse=True)


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    prefixes = Prefixes(limit=10)
    prefixes.add_prompt(list(range(30)))
    assert prefixes.match(list(range(30))) == 10
