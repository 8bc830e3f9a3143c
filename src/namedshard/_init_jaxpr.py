"""PURE. A traced function as a flat list of operations, slices of it that can be told apart, and how a slice is run.

One operation here is what JAX dispatches as one compiled unit when the function is called eagerly: a primitive, or a
whole ``jit`` such as those of ``jax.random``. A slice of several operations is compiled as one program all the same;
`fence` between them keeps the compiler from rewriting across what eager execution keeps apart.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive  # pyright: ignore[reportPrivateImportUsage]
from jaxtyping import Array

from namedshard import _jaxcompat as compat


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A literal of the traced function. Eager execution hands it over at run time, and so do we."""

    value: Any
    aval: Any


Ref: TypeAlias = int | Constant
BitsMaker: TypeAlias = Callable[[Array, int, tuple[int, ...]], Array | None]
"""From keys, bit width and shape to random bits; None leaves them to JAX."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation: values are numbers, their avals are in `Graph.avals`."""

    primitive: Primitive
    params: dict[str, Any]
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    effects: bool


@dataclasses.dataclass(slots=True, eq=False)
class Graph:
    """A traced function without nesting at the top."""

    avals: list[Any]
    ops: list[Op]
    inputs: tuple[int, ...]
    consts: dict[int, Any]
    outputs: tuple[Ref, ...]


_BODY = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
}
"""Operations that eager execution looks through."""

_PLACING = frozenset({"sharding_constraint", "reshard", "mesh_cast", "layout_constraint", "device_put"})
"""Operations that change where values are, never the values. The plan alone says where results go."""

_JIT = frozenset({"jit", "pjit"})

LARGE_JIT = 8
"""A jit with more results than this is taken for the model itself, not for one initialiser."""


def _body(primitive: Primitive, params: dict[str, Any], names: Iterable[str]) -> tuple[Jaxpr, Sequence[Any]] | None:
    if primitive.name not in names:
        return None
    inner = params["jaxpr" if primitive.name in _JIT else _BODY[primitive.name]]
    return (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())


def flatten(closed: ClosedJaxpr, *, keep_jits: bool) -> Graph:
    """The operations that eager execution would dispatch, in order.

    Args:
        closed: The traced function.
        keep_jits: Keep every jit whole, as eager execution does. Otherwise those with many results are looked through.
    """
    graph = Graph([], [], (), {}, ())

    def new(aval: Any) -> int:
        graph.avals.append(aval)
        return len(graph.avals) - 1

    def constant(value: Any, aval: Any) -> int:
        number = new(aval)
        graph.consts[number] = value
        return number

    def walk(jaxpr: Jaxpr, env: dict[Any, Ref]) -> list[Ref]:
        def read(atom: Any) -> Ref:
            return Constant(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            looked_through = [*_BODY, *(_JIT if not keep_jits and len(eqn.outvars) > LARGE_JIT else ())]
            body = _body(eqn.primitive, eqn.params, looked_through)
            if eqn.primitive.name in _PLACING:
                env.update(zip(eqn.outvars, inputs, strict=True))
            elif body is not None:
                inner, consts = body
                known: dict[Any, Ref] = dict(zip(inner.invars, inputs, strict=True))
                for var, value in zip(inner.constvars, consts, strict=True):
                    known[var] = constant(value, var.aval)
                env.update(zip(eqn.outvars, walk(inner, known), strict=True))
            else:
                outputs = tuple(new(v.aval) for v in eqn.outvars)
                env.update(zip(eqn.outvars, outputs, strict=True))
                graph.ops.append(Op(eqn.primitive, eqn.params, tuple(inputs), outputs, bool(eqn.effects)))
        return [read(v) for v in jaxpr.outvars]

    top = closed.jaxpr
    graph.inputs = tuple(new(v.aval) for v in top.invars)
    env: dict[Any, Ref] = dict(zip(top.invars, graph.inputs, strict=True))
    for var, value in zip(top.constvars, closed.consts, strict=True):
        env[var] = constant(value, var.aval)
    graph.outputs = tuple(walk(top, env))
    return graph


# --- running ----------------------------------------------------------------------------------------------------------


def apply(primitive: Primitive, params: dict[str, Any], inputs: Sequence[Any], bits: BitsMaker | None) -> list[Any]:
    """Run one operation on values or tracers; jits are opened, so that ``bits`` reaches the generators inside."""
    if primitive.name in _PLACING:
        return list(inputs)
    body = _body(primitive, params, (*_BODY, *_JIT))
    if body is not None:
        return _evaluate(*body, inputs, bits)
    if bits is not None and primitive.name == "random_bits":
        made = bits(inputs[0], params["bit_width"], tuple(params["shape"]))
        if made is not None:
            return [made]
    out = primitive.bind(*inputs, **params)
    return list(out) if primitive.multiple_results else [out]


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], bits: BitsMaker | None) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        out = apply(eqn.primitive, eqn.params, [read(v) for v in eqn.invars], bits)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def fence(x: Array, zero: Array) -> Array:
    """The same value, in a way that the compiler cannot see through.

    Within one program compilers contract ``a * b + c``, reassociate constants and skip roundings to bf16, which eager
    execution, one program per operation, never does. An exclusive or with a zero that is known at run time only stops
    them all, on every backend, and costs nothing beside memory traffic.

    Args:
        x: Any array; those that are not floating are returned as they are.
        zero: uint32 scalar, zero at run time.
    """
    if compat.is_key_array(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(fence(x.real, zero), fence(x.imag, zero))
    if x.dtype.itemsize * 8 != jnp.finfo(x.dtype).bits:
        return x
    unsigned = _UINTS[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    return jax.lax.bitcast_convert_type(bits ^ zero.astype(unsigned), x.dtype)


# --- what an operation does to values ---------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVEMENT = _names(
    """
    broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice dynamic_update_slice concatenate
    pad gather unstack split copy copy_p select_n iota stop_gradient
    """
)
_TRANSCENDENTAL = _names(
    """
    exp exp2 expm1 log log1p tanh sinh cosh sin cos tan asin acos atan asinh acosh atanh atan2 logistic pow cbrt erf
    erfc erf_inv lgamma digamma polygamma igamma igammac random_gamma random_gamma_grad regularized_incomplete_beta
    bessel_i0e bessel_i1e zeta
    """
)
_ELEMENTWISE = _names(
    """
    abs neg sign floor ceil round is_finite sqrt rsqrt square integer_pow add sub mul div rem max min nextafter clamp
    convert_element_type bitcast_convert_type reduce_precision complex real imag conj eq ne lt le gt ge eq_to lt_to
    le_to add_any optimization_barrier sort top_k argmax argmin reduce_max reduce_min cummax cummin scatter while cond
    scan random_bits random_split random_fold_in random_wrap random_unwrap random_seed threefry2x32
    """
)
_EXACT = MOVEMENT | _TRANSCENDENTAL | _ELEMENTWISE


def _inner_jaxprs(value: Any) -> Iterable[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner_jaxprs(item)


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """What decides whether an operation's values can depend on how its arrays are split.

    ``rounds``: it adds up floating values in an order that a compiler chooses. ``transcendental``: it uses functions
    that compilers approximate, on CPUs by other instructions at the ends of rows than within.
    """

    rounds: bool
    transcendental: bool

    def __or__(self, other: "Traits") -> "Traits":
        return Traits(self.rounds or other.rounds, self.transcendental or other.transcendental)


_seen: weakref.WeakKeyDictionary[Jaxpr, Traits] = weakref.WeakKeyDictionary()


def _is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and not compat.is_key_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def traits(primitive: Primitive, params: dict[str, Any], avals: Iterable[Any]) -> Traits:
    """The traits of one operation, given the avals of its inputs and outputs."""
    inner = [jaxpr for value in params.values() for jaxpr in _inner_jaxprs(value)]
    out = Traits(False, primitive.name in _TRANSCENDENTAL)
    called = primitive.name in _JIT or primitive.name in _BODY
    if primitive.name not in _EXACT and not called and any(_is_float(a) for a in avals):
        out = Traits(True, out.transcendental)
    for jaxpr in inner:
        out |= _jaxpr_traits(jaxpr)
    return out


def _jaxpr_traits(jaxpr: Jaxpr) -> Traits:
    found = _seen.get(jaxpr)
    if found is None:
        found = Traits(False, False)
        for eqn in jaxpr.eqns:
            avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
            found |= traits(eqn.primitive, eqn.params, avals)
        _seen[jaxpr] = found
    return found


# --- telling operations apart -----------------------------------------------------------------------------------------


class _Same:
    """Equal only to a wrapper of the same object, which it keeps alive."""

    __slots__ = ("it",)

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


_frozen: weakref.WeakKeyDictionary[Jaxpr, Any] = weakref.WeakKeyDictionary()


def aval_key(aval: Any) -> Any:
    """Shape, dtype and weak type; placements are decided elsewhere."""
    if not hasattr(aval, "dtype"):
        return str(aval)
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))


def literal_key(value: Any, aval: Any) -> Any:
    """A hashable stand-in for a literal."""
    content = np.asarray(value)
    return "literal", content.tobytes(), content.dtype, aval_key(aval)


def _freeze_jaxpr(jaxpr: Jaxpr) -> Any:
    found = _frozen.get(jaxpr)
    if found is not None:
        return found
    numbers: dict[Any, int] = {}

    def number(var: Any) -> int:
        return numbers.setdefault(var, len(numbers))

    def read(atom: Any) -> Any:
        return literal_key(atom.val, atom.aval) if isinstance(atom, Literal) else number(atom)

    heads = tuple((number(v), aval_key(v.aval)) for v in (*jaxpr.constvars, *jaxpr.invars))
    lines = tuple(
        (
            freeze_op(eqn.primitive, eqn.params),
            tuple(read(v) for v in eqn.invars),
            tuple((number(v), aval_key(v.aval)) for v in eqn.outvars),
        )
        for eqn in jaxpr.eqns
    )
    found = (heads, lines, tuple(read(v) for v in jaxpr.outvars))
    _frozen[jaxpr] = found
    return found


def freeze_op(primitive: Primitive, params: dict[str, Any]) -> Any:
    """A hashable stand-in for a primitive with its parameters; equal ones do the same to equal inputs."""
    if primitive.name in _BODY:
        # The rest are rules of differentiation, which are new objects in every trace.
        return primitive, freeze(params[_BODY[primitive.name]])
    return primitive, tuple((name, freeze(value)) for name, value in sorted(params.items()))


def freeze(value: Any) -> Any:
    """A hashable stand-in for a parameter. Jaxprs are compared by what they do, what cannot be hashed by identity."""
    if isinstance(value, ClosedJaxpr):
        return _freeze_jaxpr(value.jaxpr), tuple(_Same(c) for c in value.consts)
    if isinstance(value, Jaxpr):
        return _freeze_jaxpr(value)
    if isinstance(value, tuple | list):
        return tuple(freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, freeze(v)) for k, v in sorted(value.items()))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return "float", value.hex()
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value
