"""llama-index: its client of servers that are like OpenAI's."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from report import KEY, MODEL, QUESTION, URL, check

llm = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, max_tokens=16,
    context_window=2048, max_retries=0,
)  # fmt: skip


def chat() -> None:
    assert llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content


def stream() -> None:
    pieces = list(llm.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    assert pieces[-1].message.content


def complete() -> None:
    assert llm.complete(QUESTION).text


for test in (chat, stream, complete):
    check(test.__name__, test)
