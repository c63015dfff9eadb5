"""Tables that adapt to a narrow window without cutting or breaking figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

#: Spaces between two columns.
_GAP = 2
#: Minimum width of a shortened name, and of a note within its row.
_LEAST_NAME, _LEAST_NOTE = 12, 20
#: Last columns with long text, which may be wrapped.
_AT_LENGTH = ("NOTE", "PATH", "FROM")


def shorten_text(text: str, room: int) -> str:
    """Cut text in its middle: the end of a name distinguishes the workers of a model."""
    if cell_len(text) <= room:
        return text
    end = text
    while cell_len(end) > max(room - 1, 0) * 2 // 3:
        end = end[1:]
    return set_cell_size(text, max(room - 1 - cell_len(end), 0)) + set_cell_size(
        f"…{end}", min(room, 1 + cell_len(end))
    )


class Fitted:
    """A table that fits its window: if it is too wide, long text moves to lines below it, headers
    take
    two lines, the columns `drops` are left out one by one, and names are shortened.
    """

    def __init__(self, table: Table, *drops: str) -> None:
        self._table = table
        self._drops = drops

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        columns = {
            str(one.header): [_as_text(cell) for cell in one.cells] for one in self._table.columns
        }
        last = [*columns][-1]
        own = _column_width(last, columns[last])
        about = columns.pop(last) if last in _AT_LENGTH else []
        if about:
            rest = options.max_width - _needed_width(columns) - _GAP
            if rest >= min(own, _LEAST_NOTE):
                yield self._table
                return
        elif _needed_width(columns) <= options.max_width:
            yield self._table
            return
        names = [name.plain for name in next(iter(columns.values()))]
        yield _make_table(columns, self._drops, options.max_width)
        yield from (
            Text(f"{name}: ", style="dim").append_text(text)
            for name, text in zip(names, about, strict=False)
            if text.plain
        )


def _make_table(columns: dict[str, list[Text]], drops: Sequence[str], width: int) -> Table:
    if _needed_width(columns) > width:
        columns = {_two_lines(header): cells for header, cells in columns.items()}
    for drop in drops:
        if _needed_width(columns) > width:
            columns.pop(_two_lines(drop), None)
    first = next(iter(columns))
    room = width - _needed_width(columns) + _column_width(first, columns[first])
    while room < min(_LEAST_NAME, _column_width(first, columns[first])) and len(columns) > 2:
        header, cells = columns.popitem()
        room += _column_width(header, cells) + _GAP
    columns[first] = [
        Text(shorten_text(cell.plain, max(room, 1)), cell.style) for cell in columns[first]
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in columns:
        table.add_column(header, no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _needed_width(columns: dict[str, list[Text]]) -> int:
    widths = [_column_width(header, cells) for header, cells in columns.items()]
    return sum(widths) + _GAP * (len(widths) - 1)


def _column_width(header: str, cells: Sequence[Text]) -> int:
    return max(
        cell_len(line)
        for text in (header, *(one.plain for one in cells))
        for line in text.split("\n")
    )


def _as_text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _two_lines(header: str) -> str:
    """Break a header where the longer line is shortest."""
    words = header.split(" ")
    ways = [(" ".join(words[:at]), " ".join(words[at:])) for at in range(1, len(words))]
    return "\n".join(min(ways, key=lambda way: max(map(len, way)))) if ways else header
