"""PURE. Splits a traced initializer into programs, each the operations that lead up to some leaves.

A leaf's *tail* is what computes it from arguments, keys and other small integers. Cheap operations that several leaves
need are part of the tail of each. Leaves that share an expensive large value (a draw, a contraction, a loop) are
computed by one program, so that programs never need each other's results.
"""

import collections
import dataclasses
import functools
import math
import operator
import weakref
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
)

from namedshard import _jaxcompat as compat

SMALL_SIZE = 128
"""Values up to this number of elements are small."""

PLACING = frozenset({"sharding_constraint", "reshard", "mesh_cast", "layout_constraint", "device_put"})
"""Operations that change where values are, never the values: where results go is decided by the plan alone."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVING = _names("""
    broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice dynamic_update_slice concatenate pad
    gather unstack split copy copy_p select_n iota stop_gradient convert_element_type bitcast_convert_type
""")
_APPROXIMATED = _names("""
    exp exp2 expm1 log log1p tanh sinh cosh sin cos tan asin acos atan asinh acosh atanh atan2 logistic pow cbrt rsqrt
    erf erfc erf_inv lgamma digamma polygamma igamma igammac random_gamma random_gamma_grad regularized_incomplete_beta
    bessel_i0e bessel_i1e zeta
""")
"""Functions that a compiler computes by polynomials."""

_CHEAP = _MOVING.union(
    _APPROXIMATED,
    _names("""
    abs neg sign floor ceil round is_finite sqrt square integer_pow add sub mul div rem max min nextafter clamp
    reduce_precision complex real imag conj eq ne lt le gt ge eq_to lt_to le_to add_any optimization_barrier and or xor
    not shift_left shift_right_logical shift_right_arithmetic population_count clz random_wrap random_unwrap
    """),
)
_ORDERED = _CHEAP | _names("""
    sort top_k argmax argmin reduce_max reduce_min reduce_and reduce_or reduce_xor cummax cummin scatter while cond scan
    random_bits random_split random_fold_in random_seed threefry2x32
""")
"""Operations whose floating results don't depend on the order in which a compiler combines elements."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One equation, with numbers for values."""

    eqn: JaxprEqn
    inputs: "tuple[Ref, ...]"
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name


Ref: TypeAlias = int | Literal
"""The number of a value, or a literal."""


@dataclasses.dataclass(slots=True, eq=False)
class Graph:
    """A traced function as a flat list of operations, without those that no output needs. Values are numbers."""

    avals: list[Any]
    ops: list[Op]
    inputs: tuple[int, ...]
    consts: dict[int, Any]
    outputs: tuple[Ref, ...]

    def aval(self, ref: Ref) -> Any:
        """Shape and dtype of a value."""
        return ref.aval if isinstance(ref, Literal) else self.avals[ref]


def array_type(x: Any) -> tuple[tuple[int, ...], Any, bool]:
    """Shape, dtype and weak type of an array, a struct or an aval."""
    return tuple(x.shape), x.dtype, bool(getattr(x, "weak_type", False))


def values_of(refs: Iterable[Ref]) -> Iterator[int]:
    """Those that aren't literals."""
    return (ref for ref in refs if not isinstance(ref, Literal))


def literal_data(literal: Any) -> np.ndarray:
    """A literal's value, in the dtype that it has in the jaxpr."""
    return np.asarray(literal.val, literal.aval.dtype)


def flatten(closed: ClosedJaxpr) -> Graph:
    """The operations of a traced function.

    A ``jit`` with several results (a module's own, or the whole model's) is inlined, since its results have separate
    tails; so is one that says where values are, or closes over arrays, which no cache may keep. Other calls stay one
    operation each.
    """
    graph = Graph([], [], (), {}, ())

    def number(aval: Any) -> int:
        graph.avals.append(aval)
        return len(graph.avals) - 1

    def inline(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Ref]) -> list[Ref]:
        env: dict[Any, Ref] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = number(var.aval)
            graph.consts[env[var]] = const  # pyright: ignore[reportArgumentType]

        def read(atom: Any) -> Ref:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            arguments = [read(v) for v in eqn.invars]
            body = compat.called(eqn)
            inner, inner_consts = (body.jaxpr, body.consts) if isinstance(body, ClosedJaxpr) else (body, ())
            if eqn.primitive.name in PLACING:
                results: Sequence[Ref] = arguments
            elif inner is not None and (len(eqn.outvars) > 1 or inner_consts or placed_by(inner)):
                results = inline(inner, inner_consts, arguments)
            else:
                results = tuple(number(v.aval) for v in eqn.outvars)
                graph.ops.append(Op(eqn, tuple(arguments), results))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    graph.inputs = tuple(number(v.aval) for v in closed.jaxpr.invars)
    graph.outputs = tuple(inline(closed.jaxpr, closed.consts, graph.inputs))
    needed = set(values_of(graph.outputs))
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.eqn.effects or needed.intersection(op.outputs):
            kept.append(op)
            needed.update(values_of(op.inputs))
    graph.ops = kept[::-1]
    return graph


# --- what operations are like -----------------------------------------------------------------------------------------

_placed: "weakref.WeakKeyDictionary[Jaxpr, frozenset[str]]" = weakref.WeakKeyDictionary()


def placed_by(jaxpr: Jaxpr) -> frozenset[str]:
    """What a jaxpr says of where its values are: their ``"sharding"``, their ``"memory"``, or nothing.

    Also ``"arrays"`` if a call in it closes over some.
    """
    found = _placed.get(jaxpr)
    if found is not None:
        return found
    kinds: set[str] = set()
    for var in (*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)):
        kinds |= {"sharding"} if compat.is_explicitly_sharded(var.aval) else set()
        kinds |= {"memory"} if compat.space_of_type(var.aval) != compat.DEVICE_SPACE else set()
    for eqn in jaxpr.eqns:
        if is_manual(eqn) or (eqn.primitive.name in PLACING and not _moves_to_memory(eqn)):
            kinds.add("sharding")
        elif eqn.primitive.name in PLACING:
            kinds.add("memory")
        kinds |= {"arrays"} if getattr(compat.called(eqn), "consts", ()) else set()
        kinds = kinds.union(*map(placed_by, compat.inner_jaxprs(eqn.params)))
    return _placed.setdefault(jaxpr, frozenset(kinds))


def _moves_to_memory(eqn: JaxprEqn) -> bool:
    targets = eqn.params["devices"] if eqn.primitive.name == "device_put" else ()
    return bool(targets) and all(isinstance(target, jax.memory.Space) for target in targets)


def is_manual(eqn: JaxprEqn) -> bool:
    """True for operations that shard their arrays by themselves."""
    return eqn.primitive.name in ("shard_map", "xla_pmap")


def is_float(aval: Any) -> bool:
    """True for floating and complex types."""
    return hasattr(aval, "dtype") and not compat.is_key_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


_contents: "weakref.WeakKeyDictionary[Jaxpr, frozenset[tuple[str, bool]]]" = weakref.WeakKeyDictionary()


def contents_of(eqn: JaxprEqn) -> frozenset[tuple[str, bool]]:
    """The operations that an equation runs, each by its name and whether it has floating values."""
    body = compat.called(eqn)
    floats = any(is_float(v.aval) for v in (*eqn.invars, *eqn.outvars))
    names = frozenset({(eqn.primitive.name, floats)} if body is None else ())
    for jaxpr in compat.inner_jaxprs(eqn.params if body is None else body):
        found = _contents.get(jaxpr)
        if found is None:
            found = _contents.setdefault(jaxpr, frozenset[tuple[str, bool]]().union(*map(contents_of, jaxpr.eqns)))
        names |= found
    return names


def _is_expensive(op: Op) -> bool:
    """Whether leaves share an operation's result: cheap or small ones are computed by each."""
    large = any(math.prod(getattr(v.aval, "shape", ())) > SMALL_SIZE for v in op.eqn.outvars)
    return large and any(name not in _CHEAP for name, _ in contents_of(op.eqn))


# --- which leaves one program computes --------------------------------------------------------------------------------

OpGroup: TypeAlias = tuple[list[Op], list[int]]
"""Operations in order, and the values among theirs that are results."""


def split(graph: Graph, small: frozenset[int], wanted: Iterable[int]) -> list[OpGroup]:
    """The programs that compute the wanted values; ``small`` ones are computed elsewhere and given to the programs."""
    ops = [op for op in graph.ops if op.eqn.effects or not small.issuperset(op.outputs)]
    results = list(dict.fromkeys(v for v in wanted if v not in small))
    if any(op.eqn.effects for op in ops):
        return [(ops, results)]
    # As bits: the results that each value leads to, and sets of results that share an expensive value.
    bits = collections.defaultdict(int, {value: 1 << n for n, value in enumerate(results)})
    groups = list(bits.values())
    masks: list[int] = []
    for op in reversed(ops):
        mask = functools.reduce(operator.or_, (bits[value] for value in op.outputs))
        bits.update({value: bits[value] | mask for value in values_of(op.inputs)})
        masks.append(mask)
        if mask.bit_count() > 1 and _is_expensive(op):
            apart = [group for group in groups if not group & mask]
            groups = [*apart, functools.reduce(operator.or_, (group for group in groups if group & mask))]
    groups.sort(key=lambda group: group & -group)
    group_of = {n: i for i, group in enumerate(groups) for n in _positions(group)}
    programs: list[OpGroup] = [([], []) for _ in groups]
    for n, value in enumerate(results):
        programs[group_of[n]][1].append(value)
    for op, mask in zip(ops, reversed(masks), strict=True):
        for i in {group_of[n] for n in _positions(mask)}:
            programs[i][0].append(op)
    return programs


def _positions(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# --- equal programs ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """One program: the operations that lead up to some results. Those that differ only in inputs have equal keys.

    It has the name of its first ``jit``, such as that of ``jax.random.normal``, or else of its last operation. ``ops``
    are as in the graph, but an input of -1 - n stands for the n-th of ``inputs``, some of which are literals.
    ``reduces``: it combines floating elements in an order that the compiler chooses. ``approximates``: it uses
    functions that compilers compute by polynomials.
    """

    key: Hashable
    name: str
    ops: tuple[Op, ...]
    inputs: tuple[Ref, ...]
    results: tuple[int, ...]
    reduces: bool
    approximates: bool


def _is_input(op: Op, literal: Literal, others: Mapping[bool, int]) -> bool:
    """Whether a literal is an input of a program, so that leaves with other scales or constants share the program.

    Only where the results are the same bits: a compiler that knows several numbers computes with their product or sum.
    ``others``: how many of the program's operations do more than move values, by whether they are calls.
    """
    if literal_data(literal).shape:
        return False
    return op.name == "broadcast_in_dim" if not others else op.name in ("mul", "add", "sub") and others[False] == 1


def tail_of(graph: Graph, small: Container[int], ops: Sequence[Op], results: Sequence[int]) -> Tail:
    """A program's inputs and its key."""
    inputs: list[Ref] = []
    numbers: dict[int, int] = {}
    made: dict[int, int] = {}
    lines: list[Hashable] = []
    own: list[Op] = []
    others = collections.Counter(op.name in compat.PLAIN_CALLS for op in ops if op.name not in _MOVING)

    def read(op: Op, ref: Ref) -> tuple[Hashable, Ref]:
        if isinstance(ref, Literal) and not _is_input(op, ref, others):
            return _literal_key(ref), ref
        if not isinstance(ref, Literal) and ref in made:
            return made[ref], ref
        number = len(inputs) if isinstance(ref, Literal) else numbers.setdefault(ref, len(inputs))
        if number == len(inputs):
            inputs.append(ref)
        return ("input", number, array_type(graph.aval(ref)), isinstance(ref, int) and ref in small), -1 - number

    for op in ops:
        keys_and_refs = [read(op, ref) for ref in op.inputs]
        made.update({v: len(made) + n for n, v in enumerate(op.outputs)})
        lines.append((freeze_op(op.eqn), tuple(key for key, _ in keys_and_refs)))
        own.append(Op(op.eqn, tuple(ref for _, ref in keys_and_refs), op.outputs))
    key = tuple(lines), tuple(made[v] for v in results)
    jits = [str(op.eqn.params["name"]).strip("_") for op in ops if "name" in op.eqn.params]
    floating = {name for op in ops for name, floats in contents_of(op.eqn) if floats}
    return Tail(
        key,
        f"init_{jits[0] if jits else ops[-1].name}",
        tuple(own),
        tuple(inputs),
        tuple(results),
        reduces=not floating <= _ORDERED,
        approximates=not floating.isdisjoint(_APPROXIMATED),
    )


def _literal_key(literal: Literal) -> Hashable:
    """The type and bits of a literal."""
    content = np.asarray(literal.val)
    return "literal", content.tobytes(), content.dtype, array_type(literal.aval)


_frozen: "weakref.WeakKeyDictionary[Jaxpr, Hashable]" = weakref.WeakKeyDictionary()


def _freeze_jaxpr(jaxpr: Jaxpr) -> Hashable:
    found = _frozen.get(jaxpr)
    if found is not None:
        return found
    numbers: dict[Any, int] = {}

    def read(atom: Any) -> Hashable:
        return _literal_key(atom) if isinstance(atom, Literal) else numbers.setdefault(atom, len(numbers))

    def types(variables: Iterable[Any]) -> Hashable:
        return tuple((read(v), array_type(v.aval) if hasattr(v.aval, "dtype") else str(v.aval)) for v in variables)

    heads = types((*jaxpr.constvars, *jaxpr.invars))
    lines = tuple((freeze_op(e), tuple(map(read, e.invars)), types(e.outvars)) for e in jaxpr.eqns)
    return _frozen.setdefault(jaxpr, (heads, lines, tuple(map(read, jaxpr.outvars))))


def freeze_op(eqn: JaxprEqn) -> Hashable:
    """A hashable stand-in for an operation with its parameters; equal ones do the same to equal inputs."""
    body = compat.called(eqn)
    params: Mapping[str, Any] = eqn.params if body is None else {"": body, "name": eqn.params.get("name")}
    return eqn.primitive, compat.equation_options(eqn), _freeze(params)


def _freeze(value: Any) -> Hashable:
    """Jaxprs are compared by what they do. What can't be hashed, or is closed over, equals nothing."""
    if isinstance(value, ClosedJaxpr):
        return _freeze_jaxpr(value.jaxpr), tuple(object() for _ in value.consts)
    if isinstance(value, Jaxpr):
        return _freeze_jaxpr(value)
    if isinstance(value, tuple | list):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in sorted(value.items()))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return float, value.hex()
    try:
        hash(value)
    except TypeError:
        return object()
    return type(value), value
