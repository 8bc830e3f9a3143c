"""PURE. Text tables that fit a width without breaking a word: rich's own break long words in the middle."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

GAP = "  "


@dataclasses.dataclass(slots=True, eq=False)
class Column:
    """A column's title and cells.

    ``folds`` matches where a cell's line may end (None: nowhere); ``right`` aligns to the right.
    """

    title: str
    cells: Sequence[str]
    folds: re.Pattern[str] | None = None
    right: bool = False
    width: int = 0
    natural: int = dataclasses.field(init=False)
    least: int = dataclasses.field(init=False)
    _pieces: list[list[str]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._pieces = [[p for p in self.folds.split(c) if p] if self.folds else [c] for c in self.cells]
        self.natural = max(map(cell_len, (self.title, *self.cells)))
        words = {piece.rstrip() for pieces in self._pieces for piece in pieces}
        # Lines after the first are indented.
        self.least = max([cell_len(self.title), *(cell_len(w) + 2 for w in words)]) if self.folds else self.natural

    def lines(self, row: int) -> list[str]:
        """The lines of one cell at the column's width."""
        if cell_len(self.cells[row]) <= self.width:
            return [self.cells[row]]
        out: list[str] = []
        for piece in self._pieces[row]:
            if out and cell_len((out[-1] + piece).rstrip()) <= self.width:
                out[-1] += piece
            else:
                out.append(piece if not out else "  " + piece)
        return [line.rstrip() for line in out]


def total(widths: Sequence[int]) -> int:
    """The width of columns with the gaps between them."""
    return sum(widths) + len(GAP) * (len(widths) - 1)


def fit(columns: Sequence[Column], width: int) -> int:
    """Set the columns' widths, narrowing the widest of those that fold; the number of lines that the rows take."""
    for column in columns:
        column.width = column.natural
    for _ in range(total([c.width for c in columns]) - width):
        wide = [c for c in columns if c.width > c.least]
        if not wide:
            break
        max(wide, key=lambda c: c.width).width -= 1
    return sum(max(len(c.lines(row)) for c in columns) for row in range(len(columns[0].cells)))


def header(columns: Sequence[Column]) -> Iterator[Text]:
    """Titles and the line below them."""
    yield _join_cells([c.title for c in columns], columns, "bold")
    yield Text("─" * total([c.width for c in columns]), style="dim", no_wrap=True, overflow="ignore")


def row_lines(columns: Sequence[Column], row: int, style: str) -> Iterator[Text]:
    """One row's lines."""
    cells = [c.lines(row) for c in columns]
    for i in range(max(map(len, cells))):
        yield _join_cells([c[i] if i < len(c) else "" for c in cells], columns, style)


def _join_cells(cells: Sequence[str], columns: Sequence[Column], style: str) -> Text:
    padded = [
        (" " * (c.width - cell_len(s)) + s) if c.right else (s + " " * (c.width - cell_len(s)))
        for s, c in zip(cells, columns, strict=True)
    ]
    return Text(GAP.join(padded).rstrip(), style=style, no_wrap=True, overflow="ignore")


# `(30522 = 4*7630 + 2)` and `1.5 KiB` stay on one line.
_TOGETHER = re.compile(r"\(\d+ = [^()]*\)|\d [KMGT]?i?B\b")


def prose(text: str, width: int, style: str = "", indent: str = "") -> Iterator[Text]:
    """A sentence, wrapped between words."""
    for line in textwrap.wrap(
        _TOGETHER.sub(lambda found: found[0].replace(" ", "\xa0"), text),
        max(width, 20),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield Text(line.replace("\xa0", " "), style=style, no_wrap=True, overflow="ignore")
