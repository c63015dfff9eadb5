"""`servekit chat`: talk to a model of the running instance, or of any OpenAI-compatible server.

Control characters in the model's output are shown as pictures: it cannot move the cursor.
"""

# No string annotations: typer evaluates each several times, which slows down --help.
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from servekit.cli import instance_lookup
from servekit.cli.options import ApiKey, Authority, Insecure, RunDirectory
from servekit.errors import ConfigError, ServekitError, StartError

if TYPE_CHECKING:
    import httpx

    from servekit.cli.chat.stream import AnswerPart, ChatParameters


_HELP = """\
/system TEXT        set the system message and start a new chat; without TEXT, show it
/set system TEXT    the same
/set NAME VALUE     set temperature, top_p, max_tokens or seed; without VALUE, the model's default
/set verbose        show the tokens per second of each answer; /set quiet does not
/show               show the model, the system message and the parameters
/clear              start a new chat
/load MODEL         talk to another model of the server
/help, /?           show this help
/bye, /exit         quit
Ctrl-C stops an answer, Ctrl-D quits; a line that ends in \\ continues on the next one, and so does
text that begins with three quotation marks, up to the next three."""
_PARAMETERS: dict[str, Callable[[str], float | int]] = {
    "temperature": float,
    "top_p": float,
    "max_tokens": int,
    "seed": int,
}
#: Ollama's names of parameters.
_OLLAMA_NAMES = {"num_predict": "max_tokens"}
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_MOST_HISTORY = 1000
#: Timeout for the connection; an answer has none.
_CONNECT_S = 10.0


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="Name or alias of a model, a preset or an adapter; by default the first model.",
            autocompletion=instance_lookup.complete_models,
        ),
    ] = "",
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Another OpenAI-compatible server, with its /v1."),
    ] = None,
    run_dir: RunDirectory = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=2.0, help="0: always the likeliest token; higher: more varied."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Draw from the likeliest tokens that together have this probability.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed; the same seed gives the same answers.")
    ] = None,
    api_key: ApiKey = None,
    ca: Authority = None,
    insecure: Insecure = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the tokens per second of each answer.")
    ] = False,
) -> None:
    """Talk to a model. Input that is not a terminal is one question, which gets one answer."""
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    parameters = {key: value for key, value in given.items() if value is not None}
    at = url or _find_running_url(run_dir)
    with _make_client(at, api_key, ca, insecure=insecure) as client:
        _converse(client, model, parameters, system, verbose=verbose)


def talk_to(model: str, run_dir: Path, system: str) -> None:
    """Talk to a model of the instance in a run directory."""
    with _make_client(_find_running_url(run_dir), None, None, insecure=False) as it:
        _converse(it, model, {}, system)


def _converse(
    client: "httpx.Client",
    model: str,
    parameters: dict[str, float | int],
    system: str,
    *,
    verbose: bool = False,
) -> None:
    from servekit.cli.chat.stream import ChatParameters, list_models

    if sys.stdin.isatty():
        question = ""
        if isinstance(sys.stdin, io.TextIOWrapper):  # what no message can carry ends no talk
            sys.stdin.reconfigure(errors="replace")
    else:
        question = read_question(sys.stdin.buffer.read())
    if not model:
        models = list_models(client)
        if not models:
            raise ServekitError(f"{client.base_url} serves no model")
        model = models[0]
        if len(models) > 1:
            sys.stderr.write(f"{model}, of {', '.join(models)}\n")
    talk = Talk(client, ChatParameters(model, dict(parameters)), system)
    talk.verbose = verbose
    if question:
        talk.say(question)
    else:
        _run_conversation(talk, model)


def _find_running_url(run_dir: Path | None) -> str:
    try:
        status = instance_lookup.read_status(instance_lookup.find_run_dir(run_dir))
    except StartError as error:
        raise StartError(f"{error.message}, --url talks to another server") from None
    return f"{instance_lookup.reachable_url(status)}/v1"


def _make_client(
    url: str, api_key: str | None, ca: Path | None, *, insecure: bool
) -> "httpx.Client":
    """Return a client that sends the key in the variable `api_key`, or in a known one."""
    import ssl

    import httpx

    from servekit.bench.options import read_key

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: the URL must begin with http:// or https://")
    verify: bool | ssl.SSLContext = not insecure
    if ca is not None:
        try:
            verify = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise ConfigError(f"--ca {ca}: {error.strerror or error}") from None
    key = read_key(api_key, os.environ)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    return httpx.Client(base_url=url, headers=headers, timeout=timeout, verify=verify)


def read_question(data: bytes) -> str:
    """Return a piped question without the end of its last line, which `echo` adds."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        said = f"the question is not UTF-8 text (byte 0x{data[error.start]:02x})"
        raise ConfigError(said) from None
    if not text.strip():
        raise ConfigError("no question: the input is empty")
    return text.rstrip("\r\n")


class Talk:
    """A conversation."""

    def __init__(self, client: "httpx.Client", asked: "ChatParameters", system: str) -> None:
        self._client = client
        self.asked = asked
        self.system = system
        self.verbose = False
        self._turns: list[dict[str, str]] = []

    def clear(self) -> None:
        self._turns.clear()

    def say(self, text: str) -> None:
        """Send a message and show the answer, which Ctrl-C ends. Raises ServekitError."""
        from servekit.cli.chat.stream import stream_answer

        said = {"role": "user", "content": text}
        first = [{"role": "system", "content": self.system}] if self.system else []
        asked = self.asked
        if self.verbose:  # not every server knows this parameter
            counted = {**asked.parameters, "stream_options": {"include_usage": True}}
            asked = replace(asked, parameters=counted)
        pieces = stream_answer(self._client, asked, [*first, *self._turns, said])
        heard: list[str] = []
        began = time.monotonic()
        try:
            _show_answer(pieces, heard)
            if self.verbose:
                _show_rate(self.asked.usage, time.monotonic() - began)
        except KeyboardInterrupt:
            pieces.close()  # type: ignore[attr-defined]  # closing the generator disconnects
            sys.stdout.write(f"{_style_output(_DIM)} …{_style_output(_PLAIN)}\n")
        if heard:  # keep a stopped answer as well; a refused request has none
            self._turns += [said, {"role": "assistant", "content": "".join(heard)}]


def _show_answer(pieces: "Iterator[AnswerPart]", heard: list[str]) -> None:
    """Write an answer as it arrives; collect the text without thoughts in `heard`."""
    from servekit.sanitize import show_controls

    thinking = False
    try:
        for piece in pieces:
            if piece.thought != thinking:
                thinking = piece.thought
                sys.stdout.write(_style_output(_DIM) if thinking else f"{_style_output(_PLAIN)}\n")
            if not piece.thought:
                heard.append(piece.text)
            sys.stdout.write(show_controls(piece.text))
            sys.stdout.flush()
    finally:
        if thinking:
            sys.stdout.write(_style_output(_PLAIN))
    sys.stdout.write("\n")


def _show_rate(usage: dict[str, int], took_s: float) -> None:
    tokens = usage.get("completion_tokens", 0)
    rate = f"{tokens / took_s:.1f} tokens/s" if took_s else ""
    prompt = usage.get("prompt_tokens", 0)
    shown = f"{tokens} tokens in {took_s:.1f} s, {rate}; prompt: {prompt} tokens"
    sys.stdout.write(f"{_style_output(_DIM)}{shown}{_style_output(_PLAIN)}\n")


def _style_output(escape: str) -> str:
    return escape if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ""


# ---- the loop


def _run_conversation(talk: Talk, model: str) -> None:
    from servekit.sanitize import one_line

    sys.stdout.write(f"{one_line(model)}: /help lists the commands, Ctrl-D quits\n")
    with _keep_history():
        while (text := _read_line()) is not None:
            try:
                if text.strip() in ("/bye", "/exit", "/quit"):
                    return
                if not run_command(talk, text.strip()) and text.strip():
                    talk.say(strip_quotes(text))
            except ServekitError as error:  # the next request may succeed
                sys.stderr.write(f"{one_line(error.message)}\n")
            except KeyboardInterrupt:  # outside of the output of an answer
                sys.stdout.write("\n")


def _read_line() -> str | None:
    """Read a line from the user; "" for an interrupted line, None at the end."""
    # \x01 and \x02 mark characters of zero width for readline.
    bold, off = _style_output(_BOLD), _style_output(_PLAIN)
    prompt = f"\x01{bold}\x02>>> \x01{off}\x02" if bold else ">>> "
    lines: list[str] = []
    try:
        while True:
            lines.append(input(prompt if not lines else "... "))
            if _is_quoted(lines):
                if "\n".join(lines).count(_QUOTES) > 1:
                    return "\n".join(lines)
            elif not lines[-1].endswith("\\"):
                return "\n".join(lines)
            else:
                lines[-1] = lines[-1][:-1]
    except EOFError:
        sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""


_QUOTES = '"""'


def _is_quoted(lines: list[str]) -> bool:
    """Return whether the text begins with three quotation marks, also after /system."""
    first = lines[0].removeprefix("/set ").removeprefix("/system ").removeprefix("system ")
    return first.startswith(_QUOTES)


def strip_quotes(text: str) -> str:
    """Return a message without the triple quotes around several lines."""
    whole = text.strip()
    quoted = len(whole) >= 6 and whole.startswith(_QUOTES) and whole.endswith(_QUOTES)
    return whole[3:-3].strip("\n") if quoted else text


def run_command(talk: Talk, text: str) -> bool:
    """Execute a line that starts with a slash; return False if it is for the model."""
    word, _, rest = text.partition(" ")
    match word:
        case "/help" | "/?":
            sys.stdout.write(f"{_HELP}\n")
        case "/clear":
            talk.clear()
            sys.stdout.write("new chat\n")
        case "/set":
            sys.stdout.write(f"{_set_parameter(talk, rest.strip())}\n")
        case "/show":
            sys.stdout.write(f"{_describe_talk(talk)}\n")
        case "/load" if rest.strip():
            talk.asked = replace(talk.asked, model=rest.strip())
            talk.clear()
            sys.stdout.write(f"{rest.strip()}: new chat\n")
        case "/system" if rest.strip():
            talk.system = strip_quotes(rest)
            talk.clear()
            sys.stdout.write("new chat\n")
        case "/system":
            sys.stdout.write(f"{talk.system or 'no system message'}\n")
        case _ if word.startswith("/") and word[1:].isalpha():
            sys.stdout.write(f"there is no {word}; /help lists the commands\n")
        case _:
            return False
    return True


def _set_parameter(talk: Talk, text: str) -> str:
    """Execute `/set`, with Ollama's words too; return what to tell the user."""
    name, _, value = text.partition(" ")
    if name == "parameter":  # as Ollama writes it
        name, _, value = value.strip().partition(" ")
    if name in ("verbose", "quiet"):
        talk.verbose = name == "verbose"
        return name
    if name == "system":
        talk.system = strip_quotes(value.strip())
        talk.clear()
        return "new chat"
    name = _OLLAMA_NAMES.get(name, name)
    if name not in _PARAMETERS:
        return f"/set knows system, verbose, quiet, {', '.join(_PARAMETERS)}"
    try:
        number = _PARAMETERS[name](value) if value.strip() else None
        if number is not None and not -(2**63) <= number < 2**63:  # no JSON has NaN
            raise ValueError(number)
    except ValueError:
        return f"{name} is a number, not {value.strip()!r}"
    talk.asked.parameters.pop(name, None)
    if number is not None:
        talk.asked.parameters[name] = number
    return f"{name}: {'the default' if number is None else number}"


def _describe_talk(talk: Talk) -> str:
    lines = [f"model        {talk.asked.model}", f"system       {talk.system or '-'}"]
    lines += [f"{name:<12} {value}" for name, value in talk.asked.parameters.items()]
    return "\n".join(lines)


@contextlib.contextmanager
def _keep_history() -> Iterator[None]:
    """Load and save the line history, in a file that only this user can read."""
    try:
        import readline

        file = _history_file(os.environ)
    except (ImportError, RuntimeError):  # a Python built without readline, or nobody's home
        yield
        return
    readline.set_auto_history(True)
    readline.set_history_length(_MOST_HISTORY)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            readline.write_history_file(file)


def _history_file(environ: Any) -> Path:
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "servekit" / "chat_history"
