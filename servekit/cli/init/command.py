"""`servekit init`: a first configuration file, from the machine's facts and a few questions."""

# No string annotations: typer evaluates each several times, which slows down --help.
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from servekit.errors import ConfigError, ServekitError

if TYPE_CHECKING:
    from servekit.cli.init.brought_models import Carried
    from servekit.cli.init.config_template import TemplateOptions
    from servekit.system.gpu.gpus import Gpu

T = TypeVar("T")

_EVERYONE = "0.0.0.0"
_LOCAL = "127.0.0.1"
_PROGRAMS = "llama-swap, ollama, vllm or huixiangdou"


def init(
    source: Annotated[
        str | None,
        typer.Argument(
            help="With --from: llama-swap's file; Ollama's folder, or a file or - with the output"
            " of `ollama list`; a `vllm serve` command line in quotes; HuixiangDou's config.ini."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
    ] = Path("servekit.yaml"),
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A folder, a .gguf file, a hub id (org/name), or demo."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name that requests use; by default the path's.")
    ] = (None),
    gpus: Annotated[
        str | None, typer.Option(help="GPUs to use: all, none, or by index: 0,1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")
    ] = None,
    keys: Annotated[
        bool | None,
        typer.Option("--keys/--no-keys", help="Make an API key, and listen for other machines."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; use the defaults.")] = False,
    from_program: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PROGRAM",
            help="Bring the models of llama-swap, ollama, vllm or huixiangdou.",
        ),
    ] = None,
    from_huixiangdou: Annotated[
        Path | None,
        typer.Option(
            "--from-huixiangdou",
            metavar="CONFIG_INI",
            help="Configuration of HuixiangDou to convert.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a first configuration file; on a terminal, ask for what the options do not say.

    With --from, convert the models of another program, and tell what cannot be converted.
    """
    if output.exists() and not force:  # before the first question
        raise ConfigError(f"{output} is there already; --force writes over it, -o FILE elsewhere")
    if from_huixiangdou is not None:
        from_program, source = "huixiangdou", str(from_huixiangdou)
    if from_program is not None:
        _carry_over(from_program, source, output, force=force)
        return
    if source is not None:
        raise ConfigError(f"say what {source!r} is: --from {_PROGRAMS}; a model is --model")
    asks = not yes and sys.stdin.isatty() and sys.stdout.isatty()
    found = _find_gpus()
    if asks:
        sys.stdout.write(f"This machine: {_describe_machine(found)}.\n")
    path, own_name = _ask_model(model, name, output, asks=asks)
    options, key = _collect_options(
        path, own_name, _ask_gpus(gpus, found, asks=asks), port, keys, asks=asks
    )
    _write_config(output, options, found, force=force)
    if key:
        _tell_key(key)


def _carry_over(program: str, source: str | None, output: Path, *, force: bool) -> None:
    """Write the file of another program's models. Raises ConfigError if it cannot be served."""
    from servekit.cli.init import config_template

    gpus = _find_gpus()
    carried = _convert(program, source, gpus)
    config_template.write_config(output, carried.text, force=force)
    for line in carried.left_out:
        sys.stderr.write(f"not carried over: {line}\n")
    if program != "huixiangdou":
        _check_written(output, gpus)
    sys.stdout.write(_next_steps(output))


def _convert(program: str, source: str | None, gpus: "tuple[Gpu, ...]") -> "Carried":
    from servekit.cli.init import huixiangdou, llama_swap, ollama, vllm

    if program == "ollama":
        return ollama.convert_models(source, os.environ)
    if program not in ("llama-swap", "vllm", "huixiangdou"):
        raise ConfigError(f"--from knows {_PROGRAMS}, not {program!r}")
    if source is None:
        what = "'vllm serve ORG/NAME …'" if program == "vllm" else "FILE"
        raise ConfigError(f"what is to be converted is missing: --from {program} {what}")
    if program == "vllm":
        return vllm.convert_command(source, gpus)
    if program == "llama-swap":
        return llama_swap.convert_file(Path(source), os.environ, gpus)
    return huixiangdou.convert_config(Path(source))


def _next_steps(output: Path) -> str:
    file = shlex.quote(str(output))
    steps = f"check it: servekit check {file}\nserve it: servekit up --config {file}\n"
    return f"wrote {output}\n{steps}"


# ---- questions


def _ask_user(question: str, default: str, read: Callable[[str], T]) -> T:
    """Ask until the answer is valid."""
    while True:
        try:
            return read(str(typer.prompt(question, default=default)).strip())
        except ConfigError as error:
            sys.stdout.write(f"{error.message}\n")
        except typer.Abort:
            raise ConfigError("nothing was written") from None


def _ask_model(model: str | None, name: str | None, output: Path, *, asks: bool) -> tuple[str, str]:
    from servekit.cli.init.config_template import name_of

    def parse_answer(text: str) -> str:
        return _make_path(text, output)

    if model is None and asks:
        question = "Model (a folder, a .gguf file, a hub id such as Qwen/Qwen3-0.6B, or demo)"
        path = _ask_user(question, "demo", parse_answer)
    else:
        path = parse_answer(model or "demo")
    return path, name or name_of(path)


def _make_path(text: str, output: Path) -> str:
    """Return the path for the file: a local one is absolute, wherever the file is."""
    from servekit.cli.init.config_template import DEMO
    from servekit.config import paths

    if text == "demo":
        return DEMO
    if text.startswith("pypi:"):
        return text
    try:
        path = paths.check_model_path(text, Path.cwd())
        return text if path.revision else path.text  # the file keeps an address with its revision
    except ValueError as error:
        raise ConfigError(f"{error}; or say demo") from None


def _ask_gpus(said: str | None, found: "tuple[Gpu, ...]", *, asks: bool) -> tuple[int, ...] | None:
    def parse_answer(text: str) -> tuple[int, ...] | None:
        return _parse_indexes(text, found)

    if said is None and asks and found:
        return _ask_user("GPUs (all, none, or by index: 0,1)", "all", parse_answer)
    return parse_answer(said or "all")


def _parse_indexes(text: str, found: "tuple[Gpu, ...]") -> tuple[int, ...] | None:
    if text in ("all", "none"):
        return None if text == "all" else ()
    there = {str(gpu.index): gpu.index for gpu in found}
    wanted = [part.strip() for part in text.split(",")]
    if not all(part in there for part in wanted):
        have = f"there are: {', '.join(there)}" if there else "there is none here"
        raise ConfigError(f"{text!r} is not a choice of GPUs: write all, none, or indexes; {have}")
    return tuple(dict.fromkeys(there[part] for part in wanted))


def _parse_port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise ConfigError(f"{text!r} is no port: a number up to 65535; 0 is a free one")
    return int(text)


def _parse_yes(text: str) -> bool:
    if text.lower() not in ("y", "yes", "n", "no"):
        raise ConfigError("say y or n")
    return text.lower() in ("y", "yes")


def _collect_options(
    path: str,
    name: str,
    gpus: tuple[int, ...] | None,
    port: int | None,
    keys: bool | None,
    *,
    asks: bool,
) -> "tuple[TemplateOptions, str]":
    """Return the options for the file, and the API key in clear, if one was made."""
    from servekit.cli.init.config_template import TemplateOptions
    from servekit.config import keys as making

    if port is None:
        port = _ask_user("Port", "8000", _parse_port) if asks else 8000
    if keys is None:
        question = "Serve other machines, too, with an API key (y, n)"
        keys = _ask_user(question, "n", _parse_yes) if asks else False
    key, stored = making.new_key("default") if keys else ("", "")
    host = _EVERYONE if keys else _LOCAL
    return TemplateOptions(path, name, gpus, host, port, ("default", stored) if keys else None), key


# ---- the machine, and the file


def _find_gpus() -> "tuple[Gpu, ...]":
    from servekit.system.gpu.gpus import find_gpus

    return find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _describe_machine(gpus: "tuple[Gpu, ...]") -> str:
    from servekit.cli.display.tables import format_size
    from servekit.config.engines import installed

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cards = "; ".join(f"{gpu}, {format_size(gpu.total_bytes)}" for gpu in gpus) or "no NVIDIA GPU"
    engines = [
        name for name, what in installed.list_engines() if not what.startswith("not installed")
    ]
    own = ", ".join(name for name in engines if name not in ("echo", "openai", "command"))
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {format_size(memory)} of memory, {cards}; engines: {own}"


def _write_config(
    output: Path, options: "TemplateOptions", gpus: "tuple[Gpu, ...]", *, force: bool
) -> None:
    """Write the file. Raises ConfigError if it cannot be served here."""
    from dataclasses import replace

    from servekit.cli.init.config_template import compose_config, write_config

    write_config(
        output, compose_config(replace(options, machine=_describe_machine(gpus))), force=force
    )
    _check_written(output, gpus)
    sys.stdout.write(_next_steps(output))


def _check_written(output: Path, gpus: "tuple[Gpu, ...]") -> None:
    from servekit.supervisor.deployments.plan import Source

    try:
        Source(output.absolute(), {}, False).plan(gpus)
    except ServekitError as error:
        raise ConfigError(f"wrote {output}, but it cannot be served so: {error.message}") from None


def _tell_key(key: str) -> None:
    sys.stdout.write(f"{key}\n")
    sys.stdout.flush()
    sys.stderr.write("That is the API key. Keep it: nothing can show it again.\n")
