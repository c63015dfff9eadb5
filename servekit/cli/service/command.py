"""`servekit service install`: write a systemd unit that serves a file at each boot or login."""

# No string annotations: typer evaluates each several times, which slows down --help.
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from servekit.cli.up.command import Profile, make_plan, make_source
from servekit.errors import ConfigError, StartError
from servekit.system.user_dirs import find_config_home

_UNIT = Path(__file__).with_name("servekit.service")
_SYSTEM = Path("/etc/systemd/system")
_PROGRAM = "/opt/servekit/bin/servekit"
_CONFIG = "/etc/servekit/servekit.yaml"
#: The first line of the part that only the system's manager may grant.
_SANDBOX = "DynamicUser=yes"
#: Folders that ProtectHome= and PrivateTmp= hide from the system's unit.
_HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")


def install(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="The configuration file; by default as for up."),
    ] = None,
    user: Annotated[
        bool, typer.Option("--user", help="A unit of this user, which needs no root.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write the unit; - prints it."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing unit.")] = False,
    profile: Profile = "",
) -> None:
    """Write a systemd unit for a configuration file, and tell how to start it."""
    from servekit.cli.up.sources import ModelOptions, find_source

    words = [str(file)] if file is not None else []
    config = find_source(words, None, ModelOptions(), os.environ).absolute()
    if not config.is_file():
        raise ConfigError(
            f"{config} does not exist; `servekit init -o {config}` writes a first one"
        )
    if profile:
        make_plan(make_source(config, profile=profile))  # raises ConfigError if there is none
    text = write_unit(config, find_program(), user=user, profile=profile)
    if str(output) == "-":
        sys.stdout.write(text)
        return
    path = output or _unit_folder(user=user) / "servekit.service"
    advice = "" if user else "; run it with sudo, or write a unit of this user with --user"
    _write(path, text, advice, force=force)
    sys.stdout.write(f"wrote {path}\n{_next_steps(user=user)}")


def find_program() -> Path:
    """Return the `servekit` of this environment."""
    return Path(sys.executable).with_name("servekit")


def write_unit(config: Path, program: Path, *, user: bool, profile: str = "") -> str:
    """Return the text of the unit. Raises ConfigError if it could not start or read a file."""
    if set(str(program)) & set("\"'\\"):
        raise ConfigError(
            f"{program}: systemd starts no program with quotes or backslashes in its path; move it"
        )
    text = _UNIT.read_text()
    head = text[text.index("[Unit]") :]
    if user:
        head = _without_sandbox(head)
    else:
        # the Python of a virtual environment may be elsewhere, as with pyenv and uv
        paths = config, program, program.with_name("python")
        for path in (*paths, *(path.resolve() for path in paths)):
            if str(path).startswith(_HIDDEN):
                raise ConfigError(
                    f"{path}: the system's unit cannot read homes and temporary folders; move it "
                    f"(the program to {_PROGRAM}, with a Python such as /usr/bin/python3, the file "
                    f"to {_CONFIG}), or write a unit of this user with --user"
                )
    option = f" --profile {_quote_argument(profile)}" if profile else ""
    served = head.replace(_PROGRAM, _quote(program)).replace(
        _CONFIG, _quote_argument(config) + option
    )
    if user and (run_dir := _find_run_dir(config)) is not None:
        served = served.replace(" reload\n", f" reload --run-dir {_quote_argument(run_dir)}\n")
    return f"# Written by `servekit service install`.\n\n{served}"


def _find_run_dir(config: Path) -> Path | None:
    """Return the run directory that the file names, where `servekit reload` would not look."""
    from servekit.config.load import load_config

    try:
        return load_config(config).run_dir
    except ConfigError:
        return None  # of the start, which has the unit's environment, and says what is wrong


def _without_sandbox(text: str) -> str:
    """Return the unit for a user's manager: the file's or default run directory, no sandbox."""
    kept = text[: text.index(_SANDBOX)].rstrip()
    kept = kept.replace(" --run-dir /var/lib/servekit/run", "").replace(
        "LimitMEMLOCK=infinity\n", ""
    )
    lines = [
        one for one in kept.splitlines() if not one.startswith(("Wants=", "After=", "LimitMEM"))
    ]
    return "\n".join([*lines, "", "[Install]", "WantedBy=default.target", ""])


def _quote(word: Path | str) -> str:
    """Quote a word for ExecStart=; source: systemd.service(5), command lines."""
    text = str(word).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return text if shlex.quote(text) == text else f'"{text}"'


def _quote_argument(word: Path | str) -> str:
    """Quote a word after the program, where systemd expands variables."""
    return _quote(word).replace("$", "$$")


def _unit_folder(*, user: bool) -> Path:
    return find_config_home(os.environ) / "systemd" / "user" if user else _SYSTEM


def _write(path: Path, text: str, advice: str, *, force: bool) -> None:
    try:
        if path.exists() and not force:
            raise ConfigError(f"{path} is there already; --force writes over it")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}{advice}") from None


def _next_steps(*, user: bool) -> str:
    systemctl = "systemctl --user" if user else "systemctl"
    lines = [f"start it: {systemctl} daemon-reload && {systemctl} enable --now servekit"]
    if user:
        lines.append("keep it after logout: loginctl enable-linger")
    journal = "journalctl --user" if user else "journalctl"
    return "\n".join([*lines, f"read its log: {journal} -u servekit -f", ""])
