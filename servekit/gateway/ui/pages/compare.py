"""Two models, or a model and its adapter, side by side on one prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import gradio as gr

from servekit.gateway.ui.pages.page_layout import MAX_CHARS, QUIET, Frame
from servekit.gateway.ui.widgets.answer_html import render_answer
from servekit.gateway.ui.widgets.request_runner import (
    CHAT,
    COMPLETIONS,
    RequestOptions,
    merge_streams,
)

SIDES = ("a", "b")


def make_options(frame: Frame, model: str, prompt: str, *settings: float | None) -> RequestOptions:
    """Return one side's request: a chat, or a completion for a model without a chat template."""
    given = zip(("temperature", "max_tokens", "seed"), settings, strict=True)
    more = {name: value for name, value in given if value is not None}
    info = frame.router.find(model or "").status.info
    if info is not None and not info.chat:
        return RequestOptions(COMPLETIONS, {"model": model, "prompt": prompt, **more})
    messages = [{"role": "user", "content": prompt}]
    return RequestOptions(CHAT, {"model": model, "messages": messages, **more})


def build_compare_page(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("compare")
    with gr.Column(elem_classes="sk-page"):
        frame.title("compare")
        with gr.Column(elem_classes="sk-card"):
            prompt = gr.Textbox(
                label=say("prompt"), placeholder=say("chat.ask"), lines=3, max_lines=12,
                max_length=MAX_CHARS, elem_id="sk-prompt",
            )  # fmt: skip
            with gr.Row(elem_classes="sk-settings"):
                settings = [
                    gr.Number(0, label=say("temperature"), info=say("temperature.info"), step=0.1),
                    gr.Number(256, label=say("max_tokens"), info=say("max_tokens.info"), step=64),
                    gr.Number(None, label=say("seed"), info=say("seed.info"), step=1,
                              placeholder=say("seed.empty")),
                ]  # fmt: skip
            with gr.Row(elem_classes="sk-actions"):
                run = gr.Button(say("run.both"), variant="primary", elem_id="sk-run")
                stop = gr.Button(say("stop"), elem_id="sk-stop")
        panes = []
        with gr.Row(elem_classes="sk-sides"):
            for at, side in enumerate(SIDES):
                with gr.Column(elem_classes="sk-card sk-pane", elem_id=f"sk-side-{side}"):
                    model = frame.model(say("model.at", side=side.upper()), at=at)
                    text = gr.HTML("", elem_classes="sk-answer", elem_id=f"sk-answer-{side}")
                    note = gr.HTML("", elem_id=f"sk-note-{side}")
                panes.append((model, text, note))
        frame.code(partial(make_options, frame), [panes[0][0], prompt, *settings])
    inputs = [*(model for model, _, _ in panes), prompt, *settings]
    outputs = [part for _, text, note in panes for part in (text, note)]
    # one event for both: Gradio runs several events of one click one after the other
    gr.on([run.click, prompt.submit], _make_runner(frame), inputs, outputs, **QUIET)
    frame.keep_choices(blocks, [model for model, _, _ in panes], "generate")
    frame.leave_empty(blocks, settings[2:])
    frame.stop_with(blocks, stop)


def _make_runner(frame: Frame) -> Callable[..., AsyncGenerator[Any]]:
    async def run(
        request: gr.Request, a: str, b: str, prompt: str, *settings: Any
    ) -> AsyncGenerator[Any]:
        shown = dict.fromkeys(SIDES, ("", ""))
        streams = {
            side: frame.run_request(
                request, partial(make_options, frame, model, prompt, *settings), side
            )
            for side, model in zip(SIDES, (a, b), strict=True)
        }
        async with aclosing(merge_streams(streams)) as told:
            async for side, (now, note) in told:
                shown[side] = ("" if now is None else render_answer(now, frame.say), note)
                yield [part for side in SIDES for part in shown[side]]

    return run
