"""The page for embeddings: texts in; their similarities and vectors out."""

from __future__ import annotations

import asyncio
from typing import Any

import gradio as gr

from servekit.errors import ClientClosed, RequestError
from servekit.gateway.api.openai.embeddings import EmbeddingCalls, embedding_calls
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.http.request_context import ORIGIN, RequestContext
from servekit.gateway.telemetry.request_recorder import RECORDER
from servekit.gateway.ui.pages.page_layout import MAX_CHARS, QUIET, Frame, get_visit
from servekit.gateway.ui.status_html import error_note, render_note
from servekit.gateway.ui.widgets import similarity_matrix
from servekit.gateway.ui.widgets.request_runner import RequestOptions, Visit
from servekit.protocol.types import Delta

EMBEDDINGS = "/v1/embeddings"
#: The most texts at once: a larger table would be unreadable.
MOST_TEXTS = 40


def texts_of(given: str) -> list[str]:
    """Return the texts, one per nonempty line. Raises RequestError for none or too many."""
    texts = [line.strip() for line in given.splitlines() if line.strip()]
    if not texts:
        raise RequestError("write some texts first, one on each line")
    if len(texts) > MOST_TEXTS:
        raise RequestError(f"{len(texts)} texts are over the limit of {MOST_TEXTS} on this page")
    return texts


def make_options(model: str, given: str) -> RequestOptions:
    """Return the request that the page shows as code."""
    return RequestOptions(EMBEDDINGS, {"model": model, "input": texts_of(given)})


def build_embeddings_page(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("embeddings")
    with gr.Column(elem_classes="sk-page"):
        frame.title("embeddings")
        with gr.Column(elem_classes="sk-card"):
            model = frame.model(say("model"), "embed")
            texts = gr.Textbox(
                say("embeddings.example"), label=say("embeddings.texts"), lines=5, max_lines=20,
                info=say("embeddings.info", most=MOST_TEXTS), max_length=MAX_CHARS,
                elem_id="sk-texts",
            )  # fmt: skip
            with gr.Row(elem_classes="sk-actions"):
                run = gr.Button(say("embeddings.run"), variant="primary", elem_id="sk-run")
        with gr.Column(elem_classes="sk-card sk-result"):
            result = gr.HTML("", elem_id="sk-vectors")
        frame.code(make_options, [model, texts])

    async def embed(request: gr.Request, name: str, given: str) -> Any:
        try:
            return await _embed_texts(frame, request, name, texts_of(given))
        except RequestError as error:
            return error_note(error.message, frame.say)

    gr.on([run.click, texts.submit], embed, [model, texts], result, **QUIET)
    frame.keep_choices(blocks, [model], "embed")


async def _embed_texts(frame: Frame, request: gr.Request, model: str, texts: list[str]) -> str:
    """Embed through the queue, and build the table in a thread, off the event loop."""
    answers = await _ask(frame, get_visit(request), model, texts)
    raw = [vector for one in answers for vector in one.vectors]
    used = sum(one.prompt_tokens for one in answers)
    return await asyncio.to_thread(_show_vectors, frame, model, texts, raw, used)


async def _ask(frame: Frame, who: Visit, model: str, texts: list[str]) -> list[Delta]:
    """Return the answers, and note the request in the request log."""
    origin, status = RequestContext({}), ClientClosed.status  # unless it ends
    try:
        caller = await frame.router.access.charge_page_visitor(who.authorization)
        origin.key = caller.rule.name if caller else ""
        before = ACTING.set(caller), ORIGIN.set(origin)
        try:
            calls = embedding_calls(model or "", who.client, [*texts])
            asked = EmbeddingCalls(frame.router, calls, None)
        finally:
            ACTING.reset(before[0])
            ORIGIN.reset(before[1])
        answers = await asked.answers()
        status = 200
    except RequestError as error:
        status = error.status
        raise
    finally:
        RECORDER.note_request(EMBEDDINGS, status, origin)
    return answers


def _show_vectors(frame: Frame, model: str, texts: list[str], raw: list[bytes], used: int) -> str:
    vectors = [similarity_matrix.vector_of(one) for one in raw]
    size = len(vectors[0]) if vectors else 0
    said = frame.say("embeddings.done", texts=len(texts), size=size, tokens=used)
    shown = similarity_matrix.render_table(
        texts, similarity_matrix.compute_cosines(vectors), frame.say
    )
    return (
        shown
        + render_note(said)
        + similarity_matrix.render_downloads(model, texts, vectors, frame.say)
    )
