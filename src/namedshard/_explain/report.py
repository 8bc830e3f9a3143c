"""PURE. An explained plan as text, JSON and HTML.

In text, columns are left out or folded between words until the table fits the width, and what needs a sentence (why a
candidate lost, what is wrong) stands on a line of its own below its row.
"""

import dataclasses
import html
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec
from rich.console import Console, ConsoleOptions
from rich.text import Text

from namedshard._errors import MAX_LISTED, at, count_of, human_bytes
from namedshard._explain.table import Column, fit, header, prose, row_lines, total
from namedshard._plan.mapping import First, axis_names, spec_entries
from namedshard._plan.mesh import MeshLike, describe
from namedshard._plan.plan import AxisChoice, LeafPlan, Plan, lost_text


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One array of an explained tree, or several alike.

    Attributes:
        path: The leaf path; of several leaves with the indices they cover, as in ``layers[0..5].weight``.
        plan: Where it goes. A rule that cannot be applied is shown as unsharded there, and named in ``problems``.
        now: Where it is: ``"abstract"``, ``"traced"``, ``"host"``, ``"deleted"``, or what its sharding is.
        route: How it gets there, or ``"error"``.
        why: One sentence per axis whose rule was not simply applied.
        problems: What is wrong, one sentence each; empty if the leaf can be placed.
        leaves: How many leaves the row stands for.
        transient_bytes: The most that each leaf takes on one device while it moves, source and target shards included.
        across: Whether the move involves several processes.
        memory_kind: The memory that it will be in; None where only the devices know.
    """

    path: str
    plan: LeafPlan
    now: str
    route: str
    why: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    leaves: int = 1
    transient_bytes: int = 0
    across: bool = False
    memory_kind: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Lint:
    """Something about a plan that is not wrong but probably not meant.

    ``kind`` is ``"unmatched key"``, ``"absent mesh axis"``, ``"unused mesh axis"``, ``"large replica"`` or ``"names do
    not fit"``, and on the command line also ``"unmatched pattern"`` or ``"unnamed"``.
    """

    kind: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """Sums over an explained tree, in bytes.

    Attributes:
        leaves: Arrays.
        bytes: Of all arrays, each counted whole once.
        bytes_per_device: Of the arrays that are and can be placed, on each device.
        bytes_replicated: The part of ``bytes_per_device`` in arrays that every device holds whole.
        bytes_in_host_memory: The part of ``bytes_per_device`` in arrays that are, or are wanted, in host memory.
        left: Arrays that are left as they are.
        bytes_left: Their bytes.
        others: Leaves that are no arrays.
        problems: Arrays that cannot be placed.
    """

    leaves: int
    bytes: int
    bytes_per_device: int
    bytes_replicated: int
    bytes_in_host_memory: int
    left: int
    bytes_left: int
    others: int
    problems: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """What a plan would do with a tree and why; made by `explain`.

    ``str()`` gives a table that fits the terminal, a notebook shows it as HTML, and ``rich.print`` in color.

    Attributes:
        plan: The `Plan`. Where a leaf has a problem, the axis concerned is unsharded in it.
        rows: One `Row` per array of the tree, none collapsed.
        lints: What is not wrong but probably not meant; a tuple of `Lint`.
        totals: Sums over the tree, in bytes.
        unmapped: Axes that no rule maps.
        fixes: How to fix the problems, one line per kind.
    """

    plan: Plan
    rows: tuple[Row, ...]
    lints: tuple[Lint, ...]
    totals: Totals
    unmapped: tuple[str, ...]
    fixes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every leaf can be placed."""
        return not self.totals.problems

    def table(self, width: int | None = None, *, all: bool = False) -> str:
        """The table as plain text.

        Args:
            width: In terminal cells; by default the terminal's, or ``COLUMNS``, or 120 where there is neither.
            all: Show every leaf, instead of one row for those that differ only in an index.
        """
        if width is None:
            width = shutil.get_terminal_size((120, 24)).columns
        return "\n".join(line.plain for line in self.lines(width, all=all))

    def lines(self, width: int, *, all: bool = False) -> Iterator[Text]:
        """The table as styled `rich.text.Text` lines, longer than ``width`` only where a single word is."""
        rows = self.rows if all else collapse(self.rows)
        if rows:
            columns, lifted = _chosen(rows, width)
            yield from header(columns)
            for i, row in enumerate(rows):
                yield from row_lines(columns, i, "red" if row.problems else "dim" if row.plan.spec is None else "")
                for text in row.why:
                    yield from prose(text, width, "dim", "  ")
                for text in row.problems:
                    yield from prose(text, width, "red", "  ")
            yield Text("")
            if lifted:
                yield from prose("all leaves: " + ", ".join(f"{c.title} {c.cells[0]}" for c in lifted), width)
        for text in _totals(self):
            yield from prose(text, width)
        for text in _wrong(self):
            yield from prose(text, width, "red")
        for lint in self.lints:
            yield from prose(f"! {lint.text}", width, "yellow")

    def to_json(self, indent: int | None = 2) -> str:
        """Everything, leaf by leaf, as JSON; sizes are in bytes."""
        found = {
            "mesh": dict(self.plan.mesh.shape),
            "mapping": dict(self.plan.mapping.rules),
            "indivisible": self.plan.mapping.indivisible,
            "totals": dataclasses.asdict(self.totals),
            "unmapped_axes": self.unmapped,
            "lints": [dataclasses.asdict(lint) for lint in self.lints],
            "fixes": self.fixes,
            "leaves": [_row_json(row) for row in self.rows],
        }
        # Only `first` rules are not JSON themselves.
        return json.dumps(found, indent=indent, default=lambda rule: {"first": rule.candidates})

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        t = self.totals
        return f"<Explanation of {t.leaves} leaves on mesh {describe(self.plan.mesh)}: {t.problems} problems>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from self.lines(options.max_width)

    def _repr_html_(self) -> str:
        titles = [*(_COLUMNS[key][0] for key in _WHOLE), "why"]
        head = "".join(f"<th style='text-align:left'>{t}</th>" for t in titles)
        body: list[str] = []
        for row in collapse(self.rows):
            cells = [html.escape(_COLUMNS[key][1](row)) for key in _WHOLE]
            cells.append("<br>".join(html.escape(w) for w in (*row.why, *row.problems)))
            style = " style='color:#b00020'" if row.problems else ""
            body.append(f"<tr{style}>" + "".join(f"<td style='text-align:left'>{c}</td>" for c in cells) + "</tr>")
        below = "<br>".join(html.escape(t) for t in (*_totals(self), *_wrong(self)))
        lints = "".join(f"<li>{html.escape(lint.text)}</li>" for lint in self.lints)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table><p>{below}</p>"
        return table + (f"<ul>{lints}</ul>" if lints else "")


# --- words ------------------------------------------------------------------------------------------------------------


def axes_text(plan: LeafPlan) -> str:
    """``"vocab=30522, embed=384"``, or the bare shape of an array without names."""
    if plan.axes is None:
        return str(plan.shape)
    return ", ".join(f"{name}={size}" for name, size in plan.axes) or "scalar"


def spec_text(spec: PartitionSpec) -> str:
    """``"P('model', None)"``, whatever JAX itself prints."""
    sums = {kind: sorted(axes) for kind in ("reduced", "unreduced") if (axes := getattr(spec, kind))}
    parts = [*map(repr, spec_entries(spec)), *(f"{kind}={{{str(axes)[1:-1]}}}" for kind, axes in sums.items())]
    return f"P({', '.join(parts)})"


def _placed_axes(row: Row) -> str:
    """Axes and spec in one: ``"vocab=30522 → data, embed=384"``."""
    plan = row.plan
    if plan.axes is None or plan.spec is None or row.problems:
        return axes_text(plan)
    out: list[str] = []
    for (name, size), entry in zip(plan.axes, plan.spec, strict=True):
        target = "" if entry is None else f" → {' × '.join(axis_names(entry))}"
        out.append(f"{name}={size}{target}")
    return ", ".join(out) or "scalar"


def _wanted(row: Row) -> str:
    if row.problems or row.plan.spec is None:
        return "-"
    return spec_text(row.plan.spec) + (f" {row.plan.memory_kind}" if row.plan.memory_kind else "")


def why_text(choice: AxisChoice, choices: Sequence[AxisChoice], mesh: MeshLike, manual: frozenset[str]) -> str:
    """Why an axis got what it got; empty where its rule was simply applied."""
    if not choice.lost:
        return ""
    holders = {name: c.axis for c in choices if c is not choice for name in axis_names(c.won)}
    lost = lost_text(choice.size, choice.lost, mesh, manual, holders)
    if not isinstance(choice.rule, First):
        return f"{choice.axis} is left whole: {lost}"
    outcome = "is left whole" if choice.won is None else f"→ {choice.won!r}"
    return f"{choice.axis} {outcome} by {choice.rule!r}: {lost}"


# --- rows alike -------------------------------------------------------------------------------------------------------

# `[3]` of a sequence, and `.3.` of a checkpoint's tensor names.
_INDEX = re.compile(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?=\.)")


def _runs(numbers: Sequence[int]) -> str:
    """``"0..5"``, ``"0..2,7"``."""
    consecutive = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[n for _, n in group] for _, group in consecutive]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def collapse(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in nothing but one index of their path become one, from the last index to the first."""
    out = list(rows)
    depth = max((len(_INDEX.findall(row.path)) for row in out), default=0)
    for position in reversed(range(depth)):
        out = _collapse_at(out, position)
    return out


def _collapse_at(rows: Sequence[Row], position: int) -> list[Row]:
    groups: dict[Any, list[tuple[int, Row]]] = {}
    for i, row in enumerate(rows):
        found = list(_INDEX.finditer(row.path))
        if position >= len(found):
            groups[i] = [(0, row)]
            continue
        start, end = found[position].span()
        alike = dataclasses.replace(row, path="", plan=dataclasses.replace(row.plan, path=""))
        groups.setdefault((row.path[:start], row.path[end:], alike), []).append((int(row.path[start:end]), row))
    out: list[Row] = []
    for key, members in groups.items():
        first = members[0][1]
        if len(members) > 1:
            covered = _runs([n for n, _ in members])
            path = f"{key[0]}{covered if key[1].startswith(']') else f'{{{covered}}}'}{key[1]}"
            first = dataclasses.replace(first, path=path, leaves=sum(row.leaves for _, row in members))
        out.append(first)
    return out


# --- text -------------------------------------------------------------------------------------------------------------

_BEFORE_PART = re.compile(r"(?<!\.)(?=\.(?!\.)|\[)")
_AFTER_WORD = re.compile(r"(?<=[, ])(?! )")

_WHOLE = ("leaf", "axes", "spec", "dtype", "size", "now", "route")
_MERGED = ("leaf", "placed", "dtype", "size", "now", "route")
# Title, cell and where the cell may be folded, of each column.
_COLUMNS: dict[str, tuple[str, Callable[[Row], str], re.Pattern[str] | None]] = {
    "leaf": ("leaf", lambda row: at(row.path) + (f" ×{row.leaves}" if row.leaves > 1 else ""), _BEFORE_PART),
    "axes": ("axes", lambda row: axes_text(row.plan), _AFTER_WORD),
    "placed": ("axes", _placed_axes, _AFTER_WORD),
    "spec": ("spec", _wanted, _AFTER_WORD),
    "dtype": ("dtype", lambda row: str(row.plan.dtype), None),
    "size": ("per device", lambda row: "-" if row.problems else human_bytes(row.plan.bytes_per_device), None),
    "now": ("now", lambda row: row.now, _AFTER_WORD),
    "route": ("route", lambda row: row.route, _AFTER_WORD),
}


def _chosen(rows: Sequence[Row], width: int) -> tuple[list[Column], list[Column]]:
    """The columns to show, and those with the same cell everywhere that are listed below the table instead.

    Of the choices that fit, the one that takes the fewest lines; among equals the fullest.
    """
    named = {
        key: Column(title, [cell(row) for row in rows], folds, right=key == "size")
        for key, (title, cell, folds) in _COLUMNS.items()
    }
    constant = [k for k in ("dtype", "now", "route") if len(set(named[k].cells)) == 1 and len(rows) > 1]
    without = [constant[:n] for n in range(len(constant) + 1)]
    choices = [[named[k] for k in keys if k not in gone] for keys in (_WHOLE, _MERGED) for gone in without]
    fitting = [c for c in choices if total([column.least for column in c]) <= width]
    best = min(fitting, key=lambda c: fit(c, width), default=None)
    if best is None or fit(best, width) > 1.5 * len(rows):
        # A dtype is worth less than a table that can be read.
        best = [named[k] for k in _MERGED if k not in ("dtype", *constant)]
        fit(best, width)
    lifted = [named[k] for k in constant if named[k] not in best]
    return best, lifted


def _count(n: int, noun: str, plural: str) -> str:
    return f"{n} {noun if n == 1 else plural}"


def _totals(found: Explanation) -> Iterator[str]:
    t = found.totals
    yield (
        f"{_count(t.leaves, 'leaf', 'leaves')}, {human_bytes(t.bytes)}; on each of"
        f" {_count(found.plan.mesh.size, 'device', 'devices')} {human_bytes(t.bytes_per_device)},"
        f" of which {human_bytes(t.bytes_replicated)} replicated"
        + (f" and {human_bytes(t.bytes_in_host_memory)} in host memory" if t.bytes_in_host_memory else "")
    )
    if t.left:
        yield f"{_count(t.left, 'leaf is left as it is', 'leaves are left as they are')} ({human_bytes(t.bytes_left)})"
    if t.others:
        yield f"{_count(t.others, 'leaf is', 'leaves are')} no array"
    if crossing := [row.transient_bytes for row in found.rows if row.across]:
        yield (
            f"{_count(len(crossing), 'move crosses', 'moves cross')} processes, with at most"
            f" {human_bytes(max(crossing))} of a leaf on a device at a time"
        )
    yield f"mesh {describe(found.plan.mesh)}" + (
        f"; no rule for {', '.join(found.unmapped[:MAX_LISTED])}" if found.unmapped else ""
    )


def _wrong(found: Explanation) -> Iterator[str]:
    if found.totals.problems:
        yield f"{count_of(found.totals.problems, found.totals.leaves)} cannot be placed"
    yield from (f"fix: {fix}" for fix in found.fixes)


def _row_json(row: Row) -> dict[str, Any]:
    p = row.plan
    return {
        "path": row.path,
        "axes": p.axes,
        "shape": p.shape,
        "dtype": str(p.dtype),
        "spec": None if p.spec is None or row.problems else list(p.spec),
        "memory_kind": p.memory_kind,
        "bytes": p.bytes,
        "bytes_per_device": None if row.problems else p.bytes_per_device,
        "transient_bytes": None if row.problems else row.transient_bytes,
        "now": row.now,
        "route": row.route,
        "why": [
            {
                "axis": c.axis,
                "size": c.size,
                "rule": c.rule,
                "won": c.won,
                "lost": [{"candidate": candidate, "reason": reason} for candidate, reason in c.lost],
            }
            for c in p.why
        ],
        "problems": row.problems,
        "note": p.note,
    }
