"""PURE. Axis names by leaf path, for arrays that carry none: patterns, and names written as in einops."""

import collections
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from namedshard._errors import AxisNamesError, MappingError, at, count_of, did_you_mean

AxesLike: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""Names of one array's dimensions, or of those of every array whose leaf path a pattern matches."""

Axes: TypeAlias = tuple[tuple[str, str], ...]
"""(pattern, names), in order; an empty pattern is for the only array of a tree."""

Array: TypeAlias = tuple[str, Sequence[int]]
"""The leaf path and the shape of an array."""

UNNAMED = "_"
_DIMENSION = re.compile(r"\((?P<fused>[^()]*)\)|(?P<rest>\.\.\.)|(?P<name>[^\s,()]+)|(?P<stray>[()])")
_AXIS = re.compile(r"[^\s,]+")
_KEY = re.compile(r"""\[(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\]]*))\]""")

# The fields in which a Flax variable stores its array.
_FIELDS_OF_VARIABLES = (".value", ".raw_value")


class Dimension(NamedTuple):
    """One dimension: its axes, the major one first, each with its size where that is given."""

    factors: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        texts = [name if size is None else f"{name}={size}" for name, size in self.factors]
        return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"


class Names(NamedTuple):
    """The dimensions before and after a ``...``; without one, ``after`` is None."""

    before: tuple[Dimension, ...]
    after: tuple[Dimension, ...] | None


class Fitted(NamedTuple):
    """Names for an array of one shape: of each dimension the axis that can be sharded, its size, and remarks."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    note: str


def names_text(value: str | Sequence[str]) -> str:
    """Names given as a string or a tuple, as a string."""
    return value if isinstance(value, str) else " ".join(value)


@functools.lru_cache(maxsize=4096)
def parse_names(text: str) -> Names:
    """Read ``"(heads=12 head_size) ... embed"``.

    Raises:
        ValueError: Says what is wrong with it.
    """
    dimensions = [_dimension(found) for found in _DIMENSION.finditer(text)]
    whole = [d for d in dimensions if d is not None]
    if len(dimensions) > len(whole) + 1:
        raise ValueError("'...' may be there once")
    found = collections.Counter(name for d in whole for name, _ in d.factors)
    if repeated := [name for name, count in found.items() if count > 1 and name != UNNAMED]:
        raise ValueError(f"{', '.join(repeated)} {'is' if len(repeated) == 1 else 'are'} there more than once")
    if None not in dimensions:
        return Names(tuple(whole), None)
    split = dimensions.index(None)
    return Names(tuple(whole[:split]), tuple(whole[split:]))


def _dimension(found: re.Match[str]) -> Dimension | None:
    if found["stray"]:
        raise ValueError("parentheses are nested or not closed")
    if found["rest"]:
        return None
    if found["name"]:
        if "=" in found["name"]:
            raise ValueError(f"{found['name']!r}: sizes are for axes in parentheses")
        return Dimension(((found["name"], None),))
    factors = tuple(map(_factor, _AXIS.findall(found["fused"])))
    if not factors or "..." in dict(factors):
        raise ValueError(f"({found['fused']}) holds no axes")
    return Dimension(factors)


def _factor(token: str) -> tuple[str, int | None]:
    name, equals, size = token.partition("=")
    if not name or (equals and not (size.isdecimal() and int(size))):
        raise ValueError(f"{token!r} is not an axis with its size: write heads=12")
    return name, int(size) if equals else None


def fit_names(text: str, shape: Sequence[int]) -> Fitted | None:
    """The names of the dimensions of an array; None if they are for another number of dimensions.

    Raises:
        ValueError: Sizes do not multiply to that of their dimension; says which.
    """
    before, after = parse_names(text)
    named, rank = len(before) + len(after or ()), len(shape)
    if named != rank if after is None else named > rank:
        return None
    between = [Dimension(((UNNAMED, None),))] * (rank - named)
    fitted = [_fit(d, n) for d, n in zip((*before, *between, *(after or ())), shape, strict=True)]
    notes = "; ".join(note for _, _, note in fitted if note)
    return Fitted(tuple(name for name, _, _ in fitted), tuple(size for _, size, _ in fitted), notes)


def _fit(dimension: Dimension, n: int) -> tuple[str, int, str]:
    """The axis of a dimension that can be sharded, and its size; with a remark if none can."""
    (name, size), *minor = dimension.factors
    if not minor:
        if size not in (None, n):
            raise ValueError(f"{dimension} is not of size {n}")
        return name, n, ""
    known = math.prod(s for _, s in dimension.factors if s is not None)
    unknown = sum(s is None for _, s in dimension.factors)
    if n % known or (not unknown and known != n):
        raise ValueError(f"the sizes of {dimension} do not multiply to {n}")
    if size is None and unknown > 1:
        return UNNAMED, n, f"{dimension} is not sharded: its sizes are not known"
    return name, n // known if size is None else size, ""


def check_axes(axes: AxesLike | None) -> Axes:
    """Patterns and names in their checked form.

    Raises:
        MappingError: Some are not well formed; lists them all.
    """
    if axes is None:
        return ()
    given = cast("Mapping[Any, Any]", axes) if isinstance(axes, Mapping) else {"": axes}
    lines: list[str] = []
    out: list[tuple[str, str]] = []
    for pattern, value in given.items():
        if not isinstance(pattern, str) or not isinstance(value, str | tuple | list):
            lines.append(f"{pattern!r}: {value!r}: use a pattern, and names as a string or a tuple of strings")
            continue
        try:
            text = names_text(cast("str | Sequence[str]", value))
            parse_names(text)
            _regex(pattern)
        except (ValueError, TypeError) as error:
            lines.append(f"{pattern!r}: {value!r}: {error}" if pattern else f"{value!r}: {error}")
        else:
            out.append((pattern, text))
    if lines:
        raise MappingError(
            f"axes=: {len(lines)} of {len(given)} cannot be read",
            lines,
            fix='name each dimension, as in "mlp embed", "batch ... embed", "_ embed" or "(heads=12 head_size) embed"',
        )
    return tuple(out)


def dotted(path: str) -> str:
    """A leaf path with its parts joined by dots: ``layers.0.weight`` for ``['layers']['0'].weight``."""
    return _KEY.sub(lambda m: f".{m[m.lastindex or 0]}", path).lstrip(".")


@functools.lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    """What matches the whole of a dotted path; raises `ValueError` for what can't be read."""
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
    parts = dotted(pattern).split(".")
    if not all(parts) and pattern:
        raise ValueError("a part between dots is empty")
    texts = [
        "(?:[^.]+\\.)*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]") + r"\."
        for part in parts
    ]
    # Each part is followed by a dot, as the path is for matching.
    return re.compile(f"(?:.*\\.)?{''.join(texts)}")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a leaf path, as `dotted` or as ``jax.tree_util.keystr`` prints it."""
    parts, regex = dotted(path), _regex(pattern)
    stored = next((parts.removesuffix(field) for field in _FIELDS_OF_VARIABLES if parts.endswith(field)), parts)
    end = "" if pattern.startswith("re:") else "."
    return any(regex.fullmatch(text + end) for text in {parts, stored})


def _first_match(axes: Axes, path: str) -> tuple[str, str] | None:
    return next((pair for pair in axes if not pair[0] or matches(pair[0], path)), None)


def _fits(text: str, shape: Sequence[int]) -> bool:
    try:
        return fit_names(text, shape) is not None
    except ValueError:
        return False


def match_names(
    arrays: Sequence[Array], axes: Axes, total: int, *, lenient: bool = False, beside: Sequence[Array] = ()
) -> tuple[dict[int, Fitted], dict[int, str]]:
    """Names for arrays, (path, shape)s, and notes for those whose names fit another number of dimensions.

    With ``lenient``, all of a pattern may be such, as they may where the pattern fits arrays ``beside`` these: an
    optimizer's states have the paths of parameters, and other shapes.

    Raises:
        AxisNamesError: Names fit no array that their pattern matches, or sizes do not multiply; lists all.
    """
    by_pattern: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for i, (path, _) in enumerate(arrays):
        if (found := _first_match(axes, path)) is not None:
            by_pattern[found].append(i)
    fitting = {found for path, shape in beside if (found := _first_match(axes, path)) and _fits(found[1], shape)}
    fitted: dict[int, Fitted] = {}
    notes: dict[int, str] = {}
    lines: list[str] = []
    for (pattern, text), members in by_pattern.items():
        by = f"{text!r} of pattern {pattern!r}" if pattern else repr(text)
        wrong = {i: f"the names {by} do not fit rank {len(arrays[i][1])}" for i in members}
        for i in members:
            path, shape = arrays[i]
            try:
                found = fit_names(text, shape)
            except ValueError as error:
                lines.append(f"{at(path)}: {tuple(shape)}: {error}, in {by}")
                del wrong[i]
                continue
            if found is not None:
                fitted[i] = found
                del wrong[i]
        if len(wrong) == len(members) and not lenient and (pattern, text) not in fitting:
            lines += [f"{at(arrays[i][0])}: {tuple(arrays[i][1])}: {why}" for i, why in wrong.items()]
        notes |= {i: f"{why}; left as it is" for i, why in wrong.items()}
    if lines:
        raise AxisNamesError(
            f"{count_of(len(lines), total)} named wrongly by axes=",
            lines,
            fix="name every dimension (_ for one without a name, ... for several), and put narrower patterns first",
        )
    return fitted, notes


def unmatched_patterns(axes: Axes, paths: Iterable[str]) -> list[str]:
    """A line for each pattern that matches no path."""
    known = [dotted(path) for path in paths]
    return [
        f"axes pattern {pattern!r} matches no leaf{did_you_mean(pattern, known)}"
        for pattern, _ in axes
        if pattern and not any(matches(pattern, path) for path in known)
    ]
