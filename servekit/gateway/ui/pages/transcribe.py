"""The page for recordings: speak or drop a file; its text out.

The browser holds the recording: recordings.js takes it, transcripts.js sends it to the API and
shows what comes. Only the choices and the state of the models come from here.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

import gradio as gr

from servekit.gateway.api.audio.endpoints import TRANSCRIPTIONS, TRANSLATIONS
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.routing.task_check import known_info
from servekit.gateway.ui.login import CALLS
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.pages.page_layout import NOW, Frame
from servekit.gateway.ui.status_html import error_note, list_choices, render_status
from servekit.gateway.ui.widgets.request_runner import RequestOptions

STATUS_EVERY_S = 1.0
MOST_PROMPT_CHARS = 10_000
#: The most that a request has beside its recording, in bytes.
_REST_BYTES = 65_536
#: The sentences of the scripts, with the names of their fields.
_TEXTS = {
    "transcribe.kind": ("name",),
    "transcribe.empty": ("name",),
    "transcribe.large": ("name", "size", "most"),
    "transcribe.long": ("name", "length", "most"),
    "transcribe.too_long": ("length", "most"),
    "transcribe.converting": ("name",),
    "transcribe.converted": (),
    "transcribe.one": ("name",),
    "transcribe.busy": (),
    "transcribe.record": (),
    "transcribe.end": (),
    "transcribe.recorded": (),
    "transcribe.insecure": (),
    "transcribe.denied": (),
    "transcribe.no_microphone": (),
    "transcribe.microphone": ("reason",),
    "transcribe.silent": (),
    "transcribe.limit": ("most",),
    "transcribe.no_recording": (),
    "transcribe.no_model": (),
    "transcribe.sending": (),
    "transcribe.tabs": (),
    "transcribe.running": (),
    "transcribe.heard": ("at", "length"),
    "transcribe.nothing": (),
    "transcribe.cut": (),
    "transcribe.gone": (),
    "queue.one": ("count",),
    "queue.many": ("count",),
    "queue.next": (),
    "stopped": (),
}
#: An icon: a microphone.
_MICROPHONE = (
    '<svg viewBox="0 0 16 16" width="16" height="16" fill="none" stroke="currentColor" '
    'stroke-width="1.4" stroke-linecap="round" aria-hidden="true"><rect x="5.8" y="1.5" '
    'width="4.4" height="8" rx="2.2"/><path d="M3.2 7.5a4.8 4.8 0 0 0 9.6 0M8 12.3v2.2"/></svg>'
)
_FORMATS = ("txt", "srt", "vtt", "json")


def make_options(
    model: str, language: str | None, translate: bool, times: bool, prompt: str | None
) -> RequestOptions:
    """Return the request that the page shows as code."""
    given = {"language": (language or "").strip(), "prompt": (prompt or "").strip()}
    more = {name: text for name, text in given.items() if text}
    more |= {"response_format": "verbose_json"} if times else {}
    path = TRANSLATIONS if translate else TRANSCRIPTIONS
    return RequestOptions(path, {"file": "speech.wav", "model": model, **more})


def build_transcribe_page(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("transcribe")
    with gr.Column(elem_classes="sk-page"):
        frame.title("transcribe")
        with gr.Column(elem_classes="sk-card"):
            model = frame.model(say("model"), "transcribe")
            gr.HTML(_render_recorder(say, frame.max_body_bytes), elem_id="sk-recorder")
            with gr.Row(elem_classes="sk-settings"):
                language = gr.Textbox(
                    "", label=say("transcribe.language"), placeholder=say("transcribe.detect"),
                    info=say("transcribe.language.info"), max_length=60, elem_id="sk-language",
                )  # fmt: skip
                prompt = gr.Textbox(
                    "", label=say("prompt"), info=say("transcribe.prompt.info"),
                    placeholder=say("none"), max_length=MOST_PROMPT_CHARS, elem_id="sk-style",
                )  # fmt: skip
            with gr.Row(elem_classes="sk-ticks"):
                translate = gr.Checkbox(False, label=say("transcribe.translate"))
                times = gr.Checkbox(True, label=say("transcribe.times"))
            with gr.Row(elem_classes="sk-actions"):
                run = gr.Button(say("transcribe.run"), variant="primary", elem_id="sk-run")
                stop = gr.Button(say("stop"), elem_id="sk-stop")
            fault = gr.HTML("", elem_id="sk-fault")
            gr.HTML(_render_transcript(say), elem_id="sk-transcript")
        with gr.Column(elem_classes="sk-card"):
            status = gr.HTML("", elem_id="sk-workers")
        inputs = [model, language, translate, times, prompt]
        frame.code(make_options, inputs)
    sentence = gr.Textbox(visible="hidden")
    tell = gr.Button(visible="hidden", elem_id="sk-tell")

    async def show_fault(said: str) -> str:
        return error_note(said, say)

    run.click(None, inputs, None, js="(...chosen) => servekitTranscripts.run(...chosen)", **NOW)
    stop.click(None, None, None, js="() => servekitTranscripts.stop()", **NOW)
    told = "() => [servekitTranscripts.fault()]"
    tell.click(show_fault, sentence, fault, js=told, **NOW)
    frame.keep_choices(blocks, [model], "transcribe")
    _keep_status(frame, blocks, model, status)


def _keep_status(frame: Frame, blocks: gr.Blocks, model: gr.Dropdown, status: gr.HTML) -> None:
    """Keep the state of the chosen model up to date, or what to do where there is none."""
    seen = gr.State("")

    async def tick(request: gr.Request, name: str | None, before: str) -> list[Any]:
        html = _render_state(frame, await frame.caller(request), name)
        return [html, html] if html != before else [gr.skip(), gr.skip()]

    gr.on([blocks.load, model.change], tick, [model, seen], [status, seen], **NOW)
    gr.Timer(STATUS_EVERY_S).tick(tick, [model, seen], [status, seen], **NOW)


def _render_state(frame: Frame, caller: ApiKey | None, name: str | None) -> str:
    say, router = frame.say, frame.router
    if not list_choices(router, say, caller, "transcribe"):
        link = f'<a href="/docs/audio">{escape(say("nav.docs"))}</a>'
        return f'<p class="sk-hint">{escape(say("transcribe.unserved"))} {link}</p>'
    most_s = 0.0
    if name and router.serves(name) and frame.may_see(caller, router.find(name).base.status.name):
        info = known_info(router.find(name))
        most_s = 0.0 if info is None else info.max_audio_s
    hidden = f'<span class="sk-hears" hidden data-most-s="{most_s:g}"></span>'
    return hidden + render_status(router, name, say, caller)


# ---- what the scripts fill in; the page never updates it


def _render_recorder(say: Say, max_body_bytes: int) -> str:
    """Return the place for a recording as HTML."""
    texts = {
        name: say(name, **{field: f"{{{field}}}" for field in fields})
        for name, fields in _TEXTS.items()
    }
    most_bytes = max(0, max_body_bytes - _REST_BYTES)
    calls = {api: page for page, api in CALLS.items()}
    hint = say("transcribe.hint", most=f"{most_bytes / 1e6:.1f}")
    return (
        f'<section class="sk-recorder" aria-label="{escape(say("transcribe.recording"))}" '
        f'data-most-bytes="{most_bytes}" data-texts="{escape(json.dumps(texts))}" '
        f'data-transcribe="{calls[TRANSCRIPTIONS]}" data-translate="{calls[TRANSLATIONS]}">'
        '<div class="sk-drop"><div class="sk-actions">'
        f'<button type="button" class="sk-choose">{escape(say("transcribe.choose"))}</button>'
        f'<button type="button" class="sk-record">{_MICROPHONE}'
        f"<span>{escape(say('transcribe.record'))}</span></button></div>"
        f'<p class="sk-quiet">{escape(hint)}</p>'
        '<p class="sk-level" hidden><span role="timer"></span>'
        f'<meter min="0" max="1" aria-label="{escape(say("transcribe.level"))}"></meter></p>'
        '<div class="sk-taken" hidden><p><b></b> <span class="sk-quiet"></span></p>'
        f'<audio controls aria-label="{escape(say("transcribe.recording"))}"></audio></div></div>'
        '<input type="file" hidden accept="audio/*,video/*">'
        '<p class="sk-note sk-error" role="alert"></p>'
        '<p class="sk-unseen" role="status"></p></section>'
    )


def _render_transcript(say: Say) -> str:
    """Return the place for the text as HTML."""
    saves = "".join(
        f'<button type="button" class="sk-save-as" data-save="{form}" '
        f'aria-label="{escape(say("matrix.save", kind=form.upper()))}">{form.upper()}</button>'
        for form in _FORMATS
    )
    copy = escape(say("code.copy"))
    return (
        '<p class="sk-note sk-progress" role="status"></p>'
        '<div class="sk-code sk-transcript" hidden>'
        '<div class="sk-code-head"><span class="sk-about"></span><span class="sk-saves">'
        f'<button type="button" class="sk-copy" data-done="{escape(say("code.copied"))}">'
        f'{copy}</button>{saves}</span></div><pre class="sk-text" dir="auto" tabindex="0" '
        f'aria-label="{escape(say("transcribe.text"))}"></pre></div>'
    )
