"""The help of the command line: commands in groups, and `servekit help COMMAND`."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

#: Wide enough for the first sentence of every command, which then wraps.
_SENTENCE = 200
_WIDEST = 100


class Group(TyperGroup):
    """A group whose help lists its commands by their panels, in whole sentences."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take `help COMMAND` for `COMMAND --help`."""
        if args[:1] == ["help"] and "help" not in self.commands:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = str(getattr(command, "rich_help_panel", None) or "Commands")
                sentence = command.get_short_help_str(limit=_SENTENCE)
                panels.setdefault(panel, []).append((name, sentence))
        widest = max((len(name) for rows in panels.values() for name, _ in rows), default=0)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(f"{name:<{widest}}", said) for name, said in rows])


class Command(TyperCommand):
    """A command whose arguments are called by their names, as NAME or [NAME]."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for one in self.params:
            if one.param_type_name == "argument" and one.metavar is None:
                word = str(one.name).upper().replace("_", "-") + ("..." if one.nargs < 0 else "")
                one.metavar = word if one.required else f"[{word}]"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the variable of an option by its word, not by its parameter as Typer does."""
        for one in self.params:
            words = [word[2:].replace("-", "_") for word in one.opts if word.startswith("--")]
            if words and one.name not in words and one.envvar is None:
                one.envvar = f"{ctx.auto_envvar_prefix}_{words[0].upper()}"
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = (one for one in self.params if one.param_type_name == "argument")
        return ["[OPTIONS]", *(str(one.metavar) for one in arguments)]


def make_app(help_text: str) -> typer.Typer:
    """Return an application that prints its help when it is given nothing."""
    return typer.Typer(
        cls=Group,
        help=help_text,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich help is twice as slow as plain help
        callback=print_help,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": _WIDEST,
        },
    )


def print_help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
