"""What a compiled function keeps between calls, and for how long."""

import collections
import contextlib
import dataclasses
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import NamedSharding

from namedshard._cache import BoundedCache
from namedshard._jit.program import WRAPPED, Function, Program
from namedshard._jit.signature import Held
from namedshard._plan.mapping import AxisMapping, current_mapping, with_context_names
from namedshard._plan.names import Axes

MAX_CALLS = 1024


OnMismatch: TypeAlias = Literal["error", "reshard", "warn"]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a compiled function has done so far; wrappers of one function share programs, but not this.

    Attributes:
        calls: Calls that ran.
        traces: Runs of the function's Python body for the programs that it used.
        compiles: Executables made of these.
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
    """The options of `named_jit`."""

    axis_resources: AxisMapping | None
    # Or (name of an argument, its mapping)s; the one without a name is for all others.
    in_axis_resources: AxisMapping | tuple[tuple[str, AxisMapping], ...] | None
    out_axis_resources: AxisMapping | None
    donate_args: Any
    donate_kwargs: Any
    on_mismatch: OnMismatch
    jit_kwargs: tuple[tuple[str, Any], ...]
    axes: Axes = ()

    def mapping(self) -> AxisMapping | None:
        """The mapping in force inside the function, with all names by leaf path. On the hot path of every call."""
        current, given = current_mapping(), self.axis_resources
        found = current if given is None else given
        if found is None or not (self.axes or (current is not None and current.axes_items)):
            return found
        return with_context_names(found, self.axes)


@dataclasses.dataclass(slots=True, eq=False)
class CallPlan:
    """What to do in a call with one signature, and when it was last done."""

    program: Program
    # Positions of the arrays that may have been deleted: no tracers, and nothing abstract.
    concrete: tuple[int, ...]
    # Arguments to place first, and those of them that are mismatches.
    moves: tuple[tuple[int, NamedSharding], ...]
    reshards: tuple[int, ...]
    # The program's.
    held: Held | None
    # What to run once it is traced, and where outputs go because of where these arguments are.
    jitted: Any = None
    like: Mapping[int, NamedSharding] = dataclasses.field(default_factory=dict)
    has_run: bool = False
    # Consecutive calls that moved ``reshards``, and the number of the last run.
    streak: int = 0
    used: int = 0


class Store:
    """Programs by what was traced, call plans by what was passed; a program lives as long as a call plan runs it."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.programs: weakref.WeakValueDictionary[Hashable, Program] = weakref.WeakValueDictionary()
        self.calls: BoundedCache[CallPlan] = BoundedCache(MAX_CALLS)
        self.lock = threading.RLock()
        self.numbers_seen: dict[str, set[Hashable]] = collections.defaultdict(set)
        self.runs = 0


_by_anchor: weakref.WeakKeyDictionary[Any, dict[Hashable, Store]] = weakref.WeakKeyDictionary()
_by_structure: BoundedCache[Store] = BoundedCache(256)


def store_of_function(fn: Callable[..., Any], options: Options) -> Store:
    """One store for all wrappings of a function with the same options.

    The store lives as long as the function, a method's as long as its object, so it must not keep them alive. What is
    compared by value has a store per wrapping: two equal objects must not share one.
    """
    method = isinstance(fn, types.MethodType)
    anchor = fn.__self__ if method else fn
    jit_kwargs = dict(options.jit_kwargs)
    if type(anchor).__eq__ is object.__eq__:
        # Some objects take no weak references, and some options cannot be hashed.
        with contextlib.suppress(TypeError):
            reference: Any = weakref.WeakMethod(fn) if method else weakref.ref(fn)
            stores = _by_anchor.setdefault(anchor, {})
            store = Store(Function(fn, reference, jit_kwargs))
            return stores.setdefault((fn.__func__ if method else None, options), store)
    return Store(Function(fn, lambda: fn, jit_kwargs))


def store_of_structure(fn: Callable[..., Any], holder: Any, options: Options) -> Store:
    """One store for functions that hold arrays and have one structure; the 256 most recently used are kept."""
    store = Store(Function(fn, None, dict(options.jit_kwargs)))
    return _by_structure.put((jax.tree_util.tree_structure(holder), options), store)


def make_importable(wrapper: Any, fn: Callable[..., Any]) -> None:
    """Let pickle find a decorated function, whose name leads to its wrapper: it's the ``__wrapped__`` of that.

    The wrapper could be pickled by its own name, but then cloudpickle couldn't send one that is defined in a script.
    """
    name = getattr(fn, "__qualname__", "")
    try:
        found = operator.attrgetter(name)(sys.modules[fn.__module__])
    except (AttributeError, KeyError):
        return
    if found is wrapper and isinstance(fn, types.FunctionType):
        fn.__qualname__ = name + WRAPPED
