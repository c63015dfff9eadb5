"""`servekit key new`, `ls` and `rm`: the API keys of a configuration file."""

# No string annotations: typer evaluates each several times, which slows down --help.
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.options import AsJson, print_json
from servekit.cli.up.command import ConfigFile
from servekit.errors import ConfigError, StartError, did_you_mean

if TYPE_CHECKING:
    from servekit.config.sections.access import KeyConfig

_LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "max_concurrent": "at once",
    "daily_tokens": "tokens/day",
    "monthly_tokens": "tokens/month",
}


def new(
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Owner of the key, shown in logs.")
    ] = "default",
) -> None:
    """Make an API key; print it once, with the lines for the file, which hold only its hash."""
    from servekit.config import keys

    if not keys.is_name(name):
        raise ConfigError(keys.NAME_RULE)
    made, line = keys.new_key(name)
    sys.stdout.write(f"{made}\n\n")
    sys.stdout.flush()
    sys.stderr.write("Store it now: it cannot be shown again. For the configuration file:\n")
    sys.stderr.flush()
    sys.stdout.write(f"\nkeys:\n  - name: {name}\n    hash: {line}\n")


def ls(
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """List the keys of the file, their rights and limits; the keys themselves are never shown."""
    keys = _read_keys(_find_file(config))
    if as_json:
        print_json([key.model_dump(mode="json", exclude={"hash"}) for key in keys])
        return
    from servekit.cli.display.responsive_table import Fitted
    from servekit.cli.display.tables import new_table, print_tables

    table = new_table("KEY", "RIGHTS", "MODELS", "LIMITS")
    for key in keys:
        models = "all" if key.models is None else ", ".join(key.models)
        table.add_row(key.name, _rights(key), models, _limits(key))
    print_tables(
        Fitted(table) if keys else "no keys: everyone who reaches the port may use the API"
    )


def _rights(key: "KeyConfig") -> str:
    further = [name for name in ("admin", "metrics", "tools") if getattr(key, name)]
    return ", ".join(["use", *further])


def _limits(key: "KeyConfig") -> str:
    found = [(getattr(key, name, None), unit) for name, unit in _LIMITS.items()]
    return ", ".join(f"{value} {unit}" for value, unit in found if value is not None) or "-"


def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")],
    config: ConfigFile = None,
) -> None:
    """Remove a key from the file; `servekit reload` puts that into force."""
    path = _find_file(config)
    names = [key.name for key in _read_keys(path)]
    if name not in names:
        there = ", ".join(names) or "none"
        raise ConfigError(f"{path} has no key {name!r}; it has: {there}{did_you_mean(name, names)}")
    if len(names) == 1:
        raise ConfigError(
            f"{name} is the last key of {path}: without keys everyone who reaches the port may use"
            " all models. Remove `keys` from the file yourself if that is meant"
        )
    _replace(path, _cut_item(path, names.index(name)))
    sys.stdout.write(f"removed {name} from {path}; `servekit reload` puts that into force\n")


def _cut_item(path: Path, index: int) -> str:
    """Return the file's text without an item of `keys`. Raises ConfigError for JSON's style."""
    from servekit.config.yaml.file_reader import read_document
    from servekit.config.yaml.nodes import find_node

    # as bytes, so that line ends stay as they are
    lines = path.read_bytes().decode().splitlines(keepends=True)
    first = find_node(read_document(path), ("keys", index)).node.mark.line - 1
    dash = len(lines[first]) - len(lines[first].lstrip())
    if not lines[first].lstrip().startswith("- "):
        raise ConfigError(f"{path}:{first + 1}: remove this key from its line by hand")
    last = first + 1
    while last < len(lines) and _is_inside(lines[last], dash):
        last += 1
    return "".join(lines[:first] + lines[last:])


def _is_inside(line: str, dash: int) -> bool:
    return not line.strip() or len(line) - len(line.lstrip()) > dash


def _replace(path: Path, text: str) -> None:
    from servekit.config.load import load_config

    name, target = f".{path.name}.{os.getpid()}.yaml", path.resolve()
    # the file may be a link: paths in it are relative to the link, and the link stays one
    beside, fresh = path.with_name(name), target.with_name(name)
    try:
        for file in {beside, fresh}:
            file.touch(mode=0o600)
            file.write_bytes(text.encode())
        load_config(beside)  # a cut that breaks the file must not replace it
        of = target.stat()  # whoever read the file has to read the new one
        os.chown(fresh, of.st_uid, of.st_gid)
        fresh.chmod(of.st_mode & 0o777)
        fresh.replace(target)
    except ConfigError:
        raise ConfigError(
            f"{path}: other lines use an anchor (&) of this key's; remove it by hand"
        ) from None
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
        fresh.unlink(missing_ok=True)


def _find_file(config: Path | None) -> Path:
    from servekit.cli.up.sources import ModelOptions, find_source

    return find_source((), config, ModelOptions(), os.environ)


def _read_keys(path: Path) -> "tuple[KeyConfig, ...]":
    from servekit.config.load import load_config

    return load_config(path).keys
