"""What is read of a server's answer, and the message of any server's error."""

from __future__ import annotations

import pytest

from servekit.bench.client.response_schemas import decode_answer, message_of, text_of


@pytest.mark.parametrize(
    ("choice", "text", "brings"),
    [
        ('{"delta": {"content": "a"}}', "a", True),
        ('{"delta": {"content": ""}}', "", False),
        ('{"delta": {}}', "", False),
        ('{"delta": {"role": "assistant", "content": null}}', "", False),
        ('{"message": {"content": "a"}}', "a", True),
        ('{"text": "a"}', "a", True),
        ('{"text": ""}', "", False),
        ("{}", "", False),
        ('{"delta": {"reasoning_content": "hm"}}', "", True),
        ('{"delta": {"reasoning": "hm"}}', "", True),
        ('{"delta": {"content": "a", "reasoning": "hm"}}', "a", True),
        ('{"delta": {"tool_calls": [{"index": 0}]}}', "", True),
        ('{"delta": {"tool_calls": []}}', "", False),
        ('{"delta": {"tool_calls": null}}', "", False),
    ],
)
def test_thoughts_and_tool_calls_are_output_without_text(
    choice: str, text: str, brings: bool
) -> None:
    answer = decode_answer(f'{{"choices": [{choice}]}}')
    assert answer.choices is not None
    assert text_of(answer.choices[0]) == (text, brings)


@pytest.mark.parametrize(
    ("body", "is_answer", "failed"),
    [
        ('{"choices": []}', True, False),
        ('{"data": [[0.1], {"embedding": "AAAA"}]}', True, False),
        ('{"usage": {"prompt_tokens": 1}}', True, False),
        ('{"object": "list"}', False, False),
        ('{"error": {"message": "no"}}', False, True),
        ('{"choices": [], "error": null}', True, False),
    ],
)
def test_an_answer_is_told_from_other_json(body: str, is_answer: bool, failed: bool) -> None:
    answer = decode_answer(body)
    assert (answer.is_answer, answer.failed) == (is_answer, failed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "the queue is full", "code": 1}}', "the queue is full"),
        (b'{"error": "the queue is full"}', "the queue is full"),
        (b'{"message": "no\\n  such   model"}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "\\u001b[2J\\u001b]0;title\\u0007no"}', "no"),
        (b'{"detail": [{"msg": "field required"}]}', '[{"msg":"field required"}]'),
        (b'{"error": {"code": 7}}', '{"code":7}'),
        (b"<html>Bad\nGateway</html>", "<html>Bad Gateway</html>"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"", ""),
        (b"x" * 1000, "x" * 300 + " …"),
        (b'{"error": "' + b"y" * 1000 + b'"}', "y" * 300 + " …"),
    ],
)
def test_a_message_is_found_in_any_envelope_and_is_one_short_line(
    body: bytes, message: str
) -> None:
    assert message_of(body) == message
