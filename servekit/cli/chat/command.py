"""`servekit chat`: talk to a model of the running instance, or of any OpenAI-compatible server.

Control characters in the model's output are shown as pictures: it cannot move the cursor.
"""

# No string annotations: typer evaluates each several times, which slows down --help.
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from servekit.cli import instance_lookup
from servekit.cli.instance_lookup import ApiKey, Authority, Insecure, RunDirectory
from servekit.errors import ConfigError, ServekitError, StartError

if TYPE_CHECKING:
    import httpx

    from servekit.cli.chat.stream import AnswerPart, ChatParameters


_HELP = """\
/system TEXT  set the system message and start a new chat; without TEXT, show it
/clear        start a new chat
/help         show this help
Ctrl-C stops an answer, Ctrl-D quits; a line that ends in \\ continues on the next one."""
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_MOST_HISTORY = 1000
#: Timeout for the connection; an answer has none.
_CONNECT_S = 10.0


def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="Name or alias of a model, or an adapter.",
            autocompletion=instance_lookup.complete_models,
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Another OpenAI-compatible server, with its /v1."),
    ] = None,
    run_dir: RunDirectory = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed; the same seed gives the same answers.")
    ] = None,
    api_key: ApiKey = None,
    ca: Authority = None,
    insecure: Insecure = False,
) -> None:
    """Talk to a model. Input that is not a terminal is one question, which gets one answer."""
    from servekit.cli.chat.stream import ChatParameters

    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    asked = ChatParameters(model, {key: value for key, value in given.items() if value is not None})
    with _make_client(
        url or _find_running_url(run_dir), _read_api_key(api_key), ca, insecure=insecure
    ) as client:
        talk = Talk(client, asked, system)
        if sys.stdin.isatty():
            _run_conversation(talk, model)
        else:
            talk.say(_read_question(sys.stdin.read()))


def _find_running_url(run_dir: Path | None) -> str:
    try:
        status = instance_lookup.read_status(instance_lookup.find_run_dir(run_dir))
    except StartError as error:
        raise StartError(f"{error.message}, --url talks to another server") from None
    # An address that means every interface is reached at loopback.
    url = status.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    return f"{url}/v1"


def _read_api_key(name: str | None) -> str:
    """Return the API key from a variable given by name: a command line is visible to everybody."""
    if name is not None and not os.environ.get(name):
        raise ConfigError(f"the environment variable {name} is not set; --api-key names one")
    names = (name,) if name is not None else ("SERVEKIT_API_KEY", "OPENAI_API_KEY")
    return next((os.environ[one] for one in names if os.environ.get(one)), "")


def _make_client(url: str, key: str, ca: Path | None, *, insecure: bool) -> "httpx.Client":
    import ssl

    import httpx

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: the URL must begin with http:// or https://")
    verify: bool | ssl.SSLContext = not insecure
    if ca is not None:
        try:
            verify = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise ConfigError(f"--ca {ca}: {error.strerror or error}") from None
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    return httpx.Client(base_url=url, headers=headers, timeout=timeout, verify=verify)


def _read_question(text: str) -> str:
    if not text.strip():
        raise ConfigError("no question: the input is empty")
    return text


class Talk:
    """A conversation."""

    def __init__(self, client: "httpx.Client", asked: "ChatParameters", system: str) -> None:
        self._client = client
        self._asked = asked
        self.system = system
        self._turns: list[dict[str, str]] = []

    def clear(self) -> None:
        self._turns.clear()

    def say(self, text: str) -> None:
        """Send a message and show the answer, which Ctrl-C ends. Raises ServekitError."""
        from servekit.cli.chat.stream import stream_answer

        said = {"role": "user", "content": text}
        first = [{"role": "system", "content": self.system}] if self.system else []
        pieces = stream_answer(self._client, self._asked, [*first, *self._turns, said])
        heard: list[str] = []
        try:
            _show_answer(pieces, heard)
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


def _style_output(escape: str) -> str:
    return escape if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ""


# ---- the loop


def _run_conversation(talk: Talk, model: str) -> None:
    from servekit.sanitize import one_line

    sys.stdout.write(f"{one_line(model)}: /help lists the commands, Ctrl-D quits\n")
    with _keep_history():
        while (text := _read_line()) is not None:
            try:
                if not _run_command(talk, text.strip()) and text.strip():
                    talk.say(text)
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
            if not lines[-1].endswith("\\"):
                return "\n".join(lines)
            lines[-1] = lines[-1][:-1]
    except EOFError:
        sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""


def _run_command(talk: Talk, text: str) -> bool:
    """Execute a line that starts with a slash; return False if it is for the model."""
    word, _, rest = text.partition(" ")
    match word:
        case "/help":
            sys.stdout.write(f"{_HELP}\n")
        case "/clear":
            talk.clear()
            sys.stdout.write("new chat\n")
        case "/system" if rest.strip():
            talk.system = rest.strip()
            talk.clear()
            sys.stdout.write("new chat\n")
        case "/system":
            sys.stdout.write(f"{talk.system or 'no system message'}\n")
        case _ if word.startswith("/") and word[1:].isalpha():
            sys.stdout.write(f"there is no {word}; /help lists the commands\n")
        case _:
            return False
    return True


@contextlib.contextmanager
def _keep_history() -> Iterator[None]:
    """Load and save the line history, in a file that only this user can read."""
    try:
        import readline
    except ImportError:  # a Python built without readline
        yield
        return
    file = _history_file(os.environ)
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
