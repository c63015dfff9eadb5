"""A converter of HuixiangDou's `config.ini`, which is TOML in spite of its name.

It reads `[llm]` and `[llm.server]`, the settings of the standalone LLM server. The rest belongs to
HuixiangDou and stays there. The versions of the file, as in its repository:

    2024        [llm] enable_local, enable_remote, client_url
                [llm.server] local_llm_path, local_llm_max_text_length, local_llm_bind_port, and
                remote_type, remote_api_key, remote_llm_max_text_length, remote_llm_model, rpm
    since then  the local keys are gone, the remote ones stay, and tpm is new: the server is any
                OpenAI-compatible one; remote_type "vllm" is a private one
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servekit.cli.init.brought_models import Carried, resolve_model
from servekit.cli.init.config_template import name_of
from servekit.errors import ConfigError

#: HuixiangDou's limit of an answer; source: `llm_server_hybrid.py`, max_new_tokens of Qwen models.
ANSWER_TOKENS = 512
#: HuixiangDou's default port.
PORT = 8888

_WHY_NOT = {
    "remote_type": "add the remote service as a model with `engine: openai`; see its options",
    "remote_api_key": "it belongs into a variable, which `options.key_environment` names",
    "remote_llm_max_text_length": "it is how many characters of a prompt HuixiangDou sends; "
    "a context is counted in tokens, and is the model's own",
    "remote_llm_model": "of a remote model it is `path`",
    "rpm": "of a remote model it is `options.requests_per_minute`",
    "tpm": "of a remote model it is `options.tokens_per_minute`",
}


_CARRIED = {"local_llm_path", "local_llm_max_text_length", "local_llm_bind_port"}


def convert_config(path: Path) -> Carried:
    """Convert a config.ini; raises ConfigError if it has no local model."""
    llm = _find_table(_read_toml(path), "llm", path)
    server = _find_table(llm, "server", path, "llm.")
    model = server.get("local_llm_path")
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"{path}: [llm.server] has no local_llm_path, so it says of no model that it is to be"
            " served here; write `models:` yourself, see `servekit init`"
        )
    notes = [*_dropped_key_notes(llm, server)]
    # a local path becomes absolute, since the new file may be in another folder
    found, reason = resolve_model(model, path.absolute().parent)
    if reason:
        notes.append(f"llm.server.local_llm_path: carried over as it is, but {reason}")
    return Carried(_config_text(path.name, found, server, _find_port(llm, server)), tuple(notes))


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML, as HuixiangDou's config.ini is: {error}") from None


def _find_table(
    data: Mapping[str, Any], name: str, path: Path, prefix: str = ""
) -> Mapping[str, Any]:
    found = data.get(name)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: has no [{prefix}{name}]; is it HuixiangDou's config.ini?")
    return found


# ---------------------------------------------------------------- conversion of keys


def _find_port(llm: Mapping[str, Any], server: Mapping[str, Any]) -> int:
    """Return the port for its clients: the bind port, else the one in the client's URL."""
    port = server.get("local_llm_bind_port")
    if not _is_port(port):
        try:
            port = urlsplit(str(llm.get("client_url", ""))).port
        except ValueError:
            port = None
    return port if _is_port(port) and isinstance(port, int) else PORT


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 65535


def _find_length(server: Mapping[str, Any]) -> int | None:
    length = server.get("local_llm_max_text_length")
    return length if isinstance(length, int) and length > 0 else None


def _dropped_key_notes(llm: Mapping[str, Any], server: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each key that was not carried over, with the reason."""
    if llm.get("enable_local") in (0, False):
        yield "llm.enable_local: it is off there; the local model is served all the same"
    if llm.get("enable_remote") in (1, True):
        instead = "a request's `backend` picks a model by its name"
        yield f"llm.enable_remote: {_WHY_NOT['remote_type']}; {instead}"
    for key in llm.keys() - {"enable_local", "enable_remote", "client_url", "server"}:
        yield f"llm.{key}: not known here"
    for key, value in server.items():
        if key in _WHY_NOT:
            yield f"llm.server.{key}: {_WHY_NOT[key]}"
        elif key == "local_llm_bind_port" and not _is_port(value):
            yield f"llm.server.{key}: {value!r} is no port"
        elif key == "local_llm_max_text_length" and _find_length(server) is None:
            yield f"llm.server.{key}: {value!r} is no length"
        elif key not in _CARRIED:
            yield f"llm.server.{key}: not known here"
    yield (
        "its server listened on every interface; here it is this machine only, and others need"
        " `host: 0.0.0.0` with `keys`, or with `servekit up --insecure`"
    )
    yield (
        "trust_remote_code: HuixiangDou's server ran code that comes with a model; servekit does"
        " so only where the file says so, and models that transformers knows need none"
    )


# ---------------------------------------------------------------- the file


def _config_text(source: str, model: str, server: Mapping[str, Any], port: int) -> str:
    return _TEMPLATE.format(
        source=source,
        name=json.dumps(name_of(model)),
        path=json.dumps(model, ensure_ascii=False),
        context=_context_line(_find_length(server)),
        answer=ANSWER_TOKENS,
        port=port,
        first_port=8000 if port != 8000 else 8001,
    )


def _context_line(length: int | None) -> str:
    return "" if length is None else _CONTEXT.format(length=length)


#: Characters are no measure of tokens: a token is about four characters of English, but one
#: character of Chinese or less. A context derived from them would refuse prompts that
#: HuixiangDou's server accepted.
_CONTEXT = """\
    # local_llm_max_text_length = {length} was the longest prompt, in characters. A context is
    # counted in tokens: it is the model's own unless `max_context` says less.
"""

_TEMPLATE = """\
# Made from HuixiangDou's {source} by `servekit init --from-huixiangdou`. Check it, then serve it:
#
#     servekit check THIS_FILE
#     servekit up --config THIS_FILE
#
# HuixiangDou goes on as it is: its `client_url` finds this service where its own server was.

models:
  - name: {name}
    path: {path}  # local_llm_path
{context}    sampling:
      temperature: 0                   # as its server answered: always the likeliest token,
      max_tokens: {answer}                  # and no more of them
    # trust_remote_code: true          # only if the model brings code of its own that you trust

server:
  host: 127.0.0.1                      # this machine only; see `servekit docs access`
  port: {first_port}                           # the OpenAI API and the chat page
  legacy: huixiangdou                  # answer /inference and /stream as its own server did,
  legacy_port: {port}                    # where its clients look for it (local_llm_bind_port)
"""
