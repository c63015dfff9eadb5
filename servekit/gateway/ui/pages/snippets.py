"""A request as `write_curl` and as Python, to copy, with placeholders for keys."""

from __future__ import annotations

import json
import shlex
from html import escape

from servekit.gateway.api.audio.endpoints import TRANSCRIPTIONS, TRANSLATIONS
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.request_runner import CHAT, COMPLETIONS, RequestOptions

#: The environment variable that holds the key.
KEY = "SERVEKIT_API_KEY"
#: The named parameters of OpenAI's client; others go into `extra_body`.
_OPENAI = frozenset(
    [
        "model",
        "messages",
        "prompt",
        "input",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "logprobs",
        "top_logprobs",
        "n",
        "stop",
        "response_format",
        "tools",
        "tool_choice",
        "encoding_format",
        "dimensions",
        "language",
    ]
)
#: Those that a method lacks.
_NOT_OPENAI = {TRANSLATIONS: frozenset(["language"])}
#: Endpoints that take a form; its field `file` is the name of a file.
_FORMS = (TRANSCRIPTIONS, TRANSLATIONS)
_CREATE = {
    CHAT: "chat.completions.create",
    COMPLETIONS: "completions.create",
    TRANSCRIPTIONS: "audio.transcriptions.create",
    TRANSLATIONS: "audio.translations.create",
}
_SHOW = {
    CHAT: "print(answer.choices[0].message.content)",
    COMPLETIONS: "print(answer.choices[0].text)",
    TRANSCRIPTIONS: "print(answer.text)",
    TRANSLATIONS: "print(answer.text)",
}
_EMBED = "embeddings.create"
_SHOW_EMBED = "print(len(answer.data[0].embedding))"


def write_curl(origin: str, options: RequestOptions, *, closed: bool) -> str:
    """Return a command line. `closed`: a key is needed."""
    lines = [f"curl {shlex.quote(origin + options.path)}"]
    if closed:
        lines.append(f'-H "Authorization: Bearer ${KEY}"')
    if options.path in _FORMS:
        fields = {name: str(value) for name, value in options.body.items()}
        file = fields.pop("file")
        lines += [f"-F {shlex.quote(f'file=@{file}')}"]
        # not -F, to which @ and < are files
        lines += [f"--form-string {shlex.quote(f'{name}={fields[name]}')}" for name in fields]
    else:
        body = json.dumps(options.body, ensure_ascii=False, indent=2)
        lines += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(body)}"]
    return " \\\n  ".join(lines)


def write_python(origin: str, options: RequestOptions, *, closed: bool) -> str:
    """Return a program that uses OpenAI's client."""
    body = dict(options.body)
    file = body.pop("file", None)
    openai = _OPENAI - _NOT_OPENAI.get(options.path, frozenset())
    named = {key: value for key, value in body.items() if key in openai}
    more = {key: value for key, value in body.items() if key not in openai}
    arguments = [] if file is None else [f"    file=open({file!r}, 'rb'),"]
    arguments += [f"    {key}={value!r}," for key, value in named.items()]
    arguments += [f"    extra_body={more!r},"] if more else []
    key = f'os.environ["{KEY}"]' if closed else '"none"'
    head = ["import os", ""] if closed else []
    return "\n".join(
        [
            *head,
            "from openai import OpenAI",
            "",
            f"client = OpenAI(base_url={origin + '/v1'!r}, api_key={key})",
            f"answer = client.{_CREATE.get(options.path, _EMBED)}(",
            *arguments,
            ")",
            _SHOW.get(options.path, _SHOW_EMBED),
        ]
    )


def render_snippets(origin: str, options: RequestOptions, say: Say, *, closed: bool) -> str:
    """Return both as HTML, each with a button that copies it."""
    note = f'<p class="sk-quiet">{escape(say("code.key", name=KEY))}</p>' if closed else ""
    shell = _render_block("curl", write_curl(origin, options, closed=closed), say)
    return note + shell + _render_block("Python", write_python(origin, options, closed=closed), say)


def _render_block(name: str, code: str, say: Say) -> str:
    return (
        f'<div class="sk-code"><div class="sk-code-head"><span>{name}</span>'
        f'<button type="button" class="sk-copy" data-done="{escape(say("code.copied"))}"'
        f' aria-label="{escape(say("code.copy_it", name=name))}">{escape(say("code.copy"))}'
        f'</button></div><pre tabindex="0" aria-label="{name}">{escape(code)}</pre></div>'
    )
