"""Completions with the probability of each token and its alternatives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from html import escape
from typing import Any

import gradio as gr

from servekit.errors import RequestError
from servekit.gateway.ui.pages.page_layout import QUIET, Frame
from servekit.gateway.ui.widgets import token_html
from servekit.gateway.ui.widgets.answer_html import clean_text
from servekit.gateway.ui.widgets.request_runner import COMPLETIONS, RequestOptions

#: The most tokens of one completion: each is an element of the page, with its alternatives.
MOST_TOKENS = 512
MOST_PROMPT_CHARS = 20_000
NAMES = ("max_tokens", "logprobs", "temperature", "top_p", "seed")


def make_options(model: str, prompt: str, *settings: float | None) -> RequestOptions:
    """Return a completion request with log probabilities. Raises RequestError for a long one."""
    given = dict(zip(NAMES, settings, strict=True))
    given["top_p"] = given["top_p"] or None  # an empty field is 0 for a moment at first
    if (given["max_tokens"] or 0) > MOST_TOKENS:
        raise RequestError(f"max_tokens: at most {MOST_TOKENS} on this page")
    more = {name: value for name, value in given.items() if value is not None}
    return RequestOptions(COMPLETIONS, {"model": model, "prompt": prompt, **more})


def build_playground(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("playground")
    with gr.Column(elem_classes="sk-page"):
        frame.title("playground")
        with gr.Column(elem_classes="sk-card"):
            model = frame.model(say("model"))
            prompt = gr.Textbox(
                say("playground.example"), label=say("prompt"), lines=3, max_lines=12,
                max_length=MOST_PROMPT_CHARS, elem_id="sk-prompt",
            )  # fmt: skip
            with gr.Row(elem_classes="sk-settings"):
                settings = _build_settings(frame)
            with gr.Row(elem_classes="sk-actions"):
                run = gr.Button(say("run"), variant="primary", elem_id="sk-run")
                stop = gr.Button(say("stop"), elem_id="sk-stop")
        with gr.Column(elem_classes="sk-card"):
            gr.HTML(token_html.render_legend(say))
            text = gr.HTML("", elem_id="sk-tokens")
            note = gr.HTML("", elem_id="sk-token-note")
        inputs = [model, prompt, *settings]
        frame.code(make_options, inputs)

    async def complete(request: gr.Request, *values: Any) -> AsyncGenerator[Any]:
        async for shown, note in frame.run_request(request, partial(make_options, *values)):
            if shown is None:
                yield gr.skip(), note
                continue
            said = shown.choice.logprobs
            html = token_html.render_spans(str(values[1]), said, say)
            if said or not shown.choice.text:
                more = "" if shown.busy else _write_sentence(token_html.summarize_tokens(said, say))
                yield html, note + more
            else:  # an engine without log probabilities
                yield html + escape(clean_text(shown.choice.text)), note

    gr.on([run.click, prompt.submit], complete, inputs, [text, note], **QUIET)
    frame.keep_choices(blocks, [model], "generate")
    frame.leave_empty(blocks, settings[3:])
    frame.stop_with(blocks, stop)


def _write_sentence(text: str) -> str:
    return f'<p class="sk-note">{escape(text)}</p>' if text else ""


def _build_settings(frame: Frame) -> list[gr.Number]:
    """Return the fields in the order of NAMES."""
    say = frame.say
    return [
        gr.Number(48, label=say("max_tokens"), info=say("up_to", most=MOST_TOKENS), step=16),
        gr.Number(5, label=say("alternatives"), info=say("up_to", most=20), step=1),
        gr.Number(0, label=say("temperature"), info=say("temperature.info"), step=0.1),
        gr.Number(None, label=say("top_p"), info=say("top_p.info"), step=0.05,
                  placeholder=say("default")),
        gr.Number(None, label=say("seed"), info=say("seed.info"), step=1,
                  placeholder=say("seed.empty")),
    ]  # fmt: skip
