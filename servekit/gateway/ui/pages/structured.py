"""Answers of a given form, JSON by a schema or tool calls, with a check against the schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import gradio as gr

from servekit.errors import RequestError
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.pages.page_layout import MAX_CHARS, QUIET, Frame
from servekit.gateway.ui.widgets.answer_html import clean_text, clip_text, render_thoughts
from servekit.gateway.ui.widgets.request_runner import CHAT, RequestOptions, Shown
from servekit.gateway.ui.widgets.schema_check import check_schema, json_of, judge_answer

EXAMPLE_SCHEMA = """{
  "type": "object",
  "properties": {
    "city": {"type": "string", "maxLength": 40},
    "country": {"type": "string", "maxLength": 40},
    "population_millions": {"type": "integer", "minimum": 0, "maximum": 100}
  },
  "required": ["city", "country", "population_millions"],
  "additionalProperties": false
}"""
EXAMPLE_TOOLS = """[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "The weather of a city",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"]
      }
    }
  }
]"""
CHOICES = ("auto", "required", "none")


def make_schema_request(model: str, prompt: str, text: str, limit: float | None) -> RequestOptions:
    """Return a request for an answer by a schema. Raises RequestError for an invalid schema."""
    schema = check_schema(json_of(text, "the schema"), "the schema")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return _make_chat(model, prompt, limit, {"response_format": form})


def make_tools_request(
    model: str, prompt: str, text: str, choice: str, limit: float | None
) -> RequestOptions:
    """Return a request with tools. Raises RequestError for invalid definitions."""
    tools = json_of(text, "the tools")
    for name, schema in schemas_of(tools).items():
        check_schema(schema, f"the parameters of {name!r}")
    return _make_chat(model, prompt, limit, {"tools": tools, "tool_choice": choice})


def schemas_of(tools: Any) -> dict[str, Any]:
    """Return the schemas of the tools' parameters by name. Raises RequestError."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("the tools: expected a list of objects, as in the example")
    functions = [tool.get("function") for tool in tools]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions):
        raise RequestError("the tools: each needs a `function` with a `name`")
    return {one["name"]: one.get("parameters", {}) for one in functions if isinstance(one, dict)}


def _make_chat(
    model: str, prompt: str, limit: float | None, more: Mapping[str, Any]
) -> RequestOptions:
    messages = [{"role": "user", "content": prompt}]
    length = {} if limit is None else {"max_tokens": limit}
    return RequestOptions(
        CHAT, {"model": model, "messages": messages, "temperature": 0, **length, **more}
    )


# ---- the answers


def of_schema(shown: Shown, schema: Mapping[str, Any], say: Say) -> str:
    """Return the answer as HTML; once complete, with the result of the schema check."""
    judged = (
        "" if _is_unjudged(shown) else _render_mark(judge_answer(schema, shown.choice.text), say)
    )
    return judged + render_thoughts(shown.choice, say) + _render_text(shown.choice.text, say)


def of_tools(shown: Shown, schemas: Mapping[str, Any], say: Say) -> str:
    """Return the calls as HTML, each with the check of its arguments, and the text beside them."""
    done = not _is_unjudged(shown)
    calls = "".join(
        f'<section class="sk-call"><h3><code>{escape(clean_text(call.name))}</code></h3>'
        f"{_judge_call(call.name, call.arguments, schemas, say) if done else ''}"
        f"{_render_text(call.arguments, say)}</section>"
        for call in shown.choice.calls
    )
    none = (
        f'<p class="sk-note">{escape(say("tools.none_called"))}</p>' if done and not calls else ""
    )
    text = _render_text(shown.choice.text, say) if shown.choice.text else ""
    return calls + none + render_thoughts(shown.choice, say) + text


def _judge_call(name: str, arguments: str, schemas: Mapping[str, Any], say: Say) -> str:
    if name not in schemas:
        return _render_mark(say("tools.unknown"), say)
    schema = schemas[name]
    return _render_mark(judge_answer(schema if isinstance(schema, dict) else {}, arguments), say)


def _is_unjudged(shown: Shown) -> bool:
    return shown.busy or bool(shown.error)


def _render_mark(problem: str, say: Say) -> str:
    if not problem:
        return f'<p class="sk-verdict sk-valid" role="status">✓ {escape(say("valid"))}</p>'
    said = f"{escape(say('invalid'))}: {escape(clean_text(problem))}"
    return f'<p class="sk-verdict sk-invalid" role="status">✗ {said}</p>'


def _render_text(text: str, say: Say) -> str:
    label = escape(say("answer"))
    return f'<pre class="sk-text" tabindex="0" aria-label="{label}">{clip_text(text, say)}</pre>'


# ---- the page


def build_structured_page(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("structured")
    with gr.Column(elem_classes="sk-page"):
        frame.title("structured")
        with gr.Tabs():
            with gr.Tab(say("structured.schema")):
                schema_model = _schema_side(frame, blocks)
            with gr.Tab(say("structured.tools")):
                tools_model = _tools_side(frame, blocks)
    frame.keep_choices(blocks, [schema_model, tools_model], "generate")


def _build_inputs(
    frame: Frame, example: str, kind: str
) -> tuple[gr.Dropdown, gr.Textbox, gr.Textbox]:
    say = frame.say
    model = frame.model(say("model"))
    prompt = gr.Textbox(
        say(f"{kind}.example"), label=say("prompt"), lines=2, max_lines=8, max_length=MAX_CHARS,
        elem_id=f"sk-{kind}-prompt",
    )  # fmt: skip
    text = gr.Textbox(
        example, label=say(f"{kind}.text"), info=say(f"{kind}.info"), lines=8, max_lines=24,
        elem_id=f"sk-{kind}-text", elem_classes="sk-mono",
    )  # fmt: skip
    return model, prompt, text


def _build_outputs(frame: Frame, blocks: gr.Blocks, kind: str) -> tuple[gr.Button, list[gr.HTML]]:
    with gr.Row(elem_classes="sk-actions"):
        run = gr.Button(frame.say("run"), variant="primary", elem_id=f"sk-{kind}-run")
        stop = gr.Button(frame.say("stop"), elem_id=f"sk-{kind}-stop")
    frame.stop_with(blocks, stop)
    result = gr.HTML("", elem_id=f"sk-{kind}-result", elem_classes="sk-answer")
    return run, [result, gr.HTML("", elem_id=f"sk-{kind}-note")]


def _build_limit(frame: Frame) -> gr.Number:
    return gr.Number(256, label=frame.say("max_tokens"), info=frame.say("max_tokens.info"), step=64)


def _schema_side(frame: Frame, blocks: gr.Blocks) -> gr.Dropdown:
    with gr.Column(elem_classes="sk-card"):
        model, prompt, text = _build_inputs(frame, EXAMPLE_SCHEMA, "schema")
        limit = _build_limit(frame)
        run, outputs = _build_outputs(frame, blocks, "schema")
    inputs = [model, prompt, text, limit]
    frame.code(make_schema_request, inputs)

    async def ask_schema(request: gr.Request, *values: Any) -> AsyncGenerator[Any]:
        async for shown, note in frame.run_request(
            request, partial(make_schema_request, *values), "schema"
        ):
            if shown is None:
                yield "", note
                continue
            schema = json_of(values[2], "the schema")
            yield await asyncio.to_thread(of_schema, shown, schema, frame.say), note

    run.click(ask_schema, inputs, outputs, **QUIET)
    return model


def _tools_side(frame: Frame, blocks: gr.Blocks) -> gr.Dropdown:
    with gr.Column(elem_classes="sk-card"):
        model, prompt, text = _build_inputs(frame, EXAMPLE_TOOLS, "tools")
        with gr.Row(elem_classes="sk-settings"):
            options: Sequence[tuple[str, str]] = [
                (frame.say(f"tools.{one}"), one) for one in CHOICES
            ]
            choice = gr.Dropdown(
                options, value=CHOICES[0], label=frame.say("tools.choice"), interactive=True
            )
            limit = _build_limit(frame)
        run, outputs = _build_outputs(frame, blocks, "tools")
    inputs = [model, prompt, text, choice, limit]
    frame.code(make_tools_request, inputs)

    async def ask_tools(request: gr.Request, *values: Any) -> AsyncGenerator[Any]:
        async for shown, note in frame.run_request(
            request, partial(make_tools_request, *values), "tools"
        ):
            if shown is None:
                yield "", note
                continue
            schemas = schemas_of(json_of(values[2], "the tools"))
            yield await asyncio.to_thread(of_tools, shown, schemas, frame.say), note

    run.click(ask_tools, inputs, outputs, **QUIET)
    return model
