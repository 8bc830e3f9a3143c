"""What a compiled function keeps between calls, and for how long."""

import collections
import dataclasses
import threading
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeAlias

from jax.sharding import NamedSharding

from namedshard._jit.program import Program
from namedshard._plan.mapping import AxisMapping
from namedshard._types import PyTreeDef

MAX_CALLS = 4096
MAX_PROGRAMS = 1024


OnMismatch: TypeAlias = Literal["error", "reshard", "warn"]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a compiled function has done so far.

    Attributes:
        calls: Calls that ran.
        traces: Runs of the function's Python body.
        compiles: Executables made.
        reshards: Arguments moved by ``on_mismatch="reshard"``.
        bytes_moved: Bytes of these.
    """

    calls: int
    traces: int
    compiles: int
    reshards: int
    bytes_moved: int


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What `named_jit` was told, apart from the function."""

    axis_resources: AxisMapping | None
    in_axis_resources: AxisMapping | None
    out_axis_resources: AxisMapping | None
    donate_args: Any
    donate_kwargs: Any
    on_mismatch: OnMismatch
    jit_kwargs: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """What to do for one signature.

    Attributes:
        program: What to run.
        names: The leaf path of each argument leaf.
        paths: The same of those that are arrays.
        live: Positions of the arguments that may have been deleted: concrete arrays.
        moves: Arguments to place first, with where.
        reshards: Those of them that are mismatches.
        held: The structure's metadata, and what tells it from metadata that is equal but of other types; None where
            nothing could.
        settled: Whether it has run.
        streak: How often in a row it moved ``reshards``; ``last_run`` is the number of the run that did so last.
        used: The number of the last run.
    """

    program: Program
    names: tuple[str, ...]
    paths: tuple[str, ...]
    live: tuple[int, ...]
    moves: tuple[tuple[int, NamedSharding], ...]
    reshards: tuple[int, ...]
    held: tuple[list[Any], Hashable] | None
    settled: bool = False
    streak: int = 0
    last_run: int = -2
    used: int = 0


class Store:
    """Programs by what was traced, calls by what was passed. The least recently used are forgotten in time."""

    def __init__(self) -> None:
        self.programs: dict[Hashable, Program] = {}
        self.calls: dict[Hashable, Call] = {}
        self.last: tuple[Any, Call | None] = (None, None)
        self.lock = threading.RLock()
        self.numbers_seen: dict[str, set[Hashable]] = collections.defaultdict(set)
        self.warned: set[str] = set()
        self.runs = 0
        self.reshards = 0
        self.bytes_moved = 0
        self._forgotten_traces = 0
        self._forgotten_compiles = 0

    def add(self, key: Hashable, call: Call) -> None:
        """Keep a call; a program that no call leads to any more goes with the calls that are forgotten."""
        call.used = self.runs
        self.calls[key] = call
        if len(self.calls) > MAX_CALLS or len(self.programs) > MAX_PROGRAMS:
            recent = sorted(self.calls.items(), key=lambda item: item[1].used)
            kept = recent[len(recent) // 4 :]
            self.calls = dict(kept)
            needed = {id(c.program) for _, c in kept}
            for name, program in list(self.programs.items()):
                if id(program) not in needed:
                    self._forgotten_traces += program.traces
                    self._forgotten_compiles += program.compiles
                    del self.programs[name]

    @property
    def traces(self) -> int:
        """Runs of the function's Python body."""
        return self._forgotten_traces + sum(p.traces for p in list(self.programs.values()))

    @property
    def compiles(self) -> int:
        """Executables made."""
        return self._forgotten_compiles + sum(p.compiles for p in list(self.programs.values()))


_by_anchor: weakref.WeakKeyDictionary[Any, dict[Hashable, Store]] = weakref.WeakKeyDictionary()
_by_structure: collections.OrderedDict[Hashable, Store] = collections.OrderedDict()


def _known_by_identity(x: Any) -> bool:
    return type(x).__eq__ is object.__eq__


def store_of_function(fn: Callable[..., Any], options: Hashable) -> Store:
    """One store for all wrappings of a function with the same options, which lives as long as the function.

    A method counts as its object's. What is compared by value has a store per wrapping.
    """
    method = isinstance(fn, types.MethodType)
    anchor = fn.__self__ if method else fn
    if not _known_by_identity(anchor):
        return Store()
    try:
        return _by_anchor.setdefault(anchor, {}).setdefault((fn.__func__ if method else None, options), Store())
    except TypeError:
        return Store()


def weakly(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """The function without keeping it alive where `store_of_function` shares its store: its wrapping does that."""
    method = isinstance(fn, types.MethodType)
    if not _known_by_identity(fn.__self__ if method else fn):
        return lambda: fn
    try:
        found: Any = weakref.WeakMethod(fn) if method else weakref.ref(fn)
    except TypeError:
        return lambda: fn
    return found


def store_of_structure(treedef: PyTreeDef, options: Hashable) -> Store:
    """One store for functions that hold arrays and have one structure; the oldest of 256 are forgotten."""
    try:
        store = _by_structure.setdefault((treedef, options), Store())
    except TypeError:
        return Store()
    _by_structure.move_to_end((treedef, options))
    while len(_by_structure) > 256:
        _by_structure.popitem(last=False)
    return store
