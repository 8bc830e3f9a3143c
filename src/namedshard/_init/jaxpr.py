"""PURE. A traced function as a flat list of operations, slices of it that can be told apart, and how a slice is run.

One operation here is what JAX dispatches as one compiled unit when the function is called eagerly: a primitive, or a
whole ``jit`` such as those of ``jax.random``. A slice of several operations is compiled as one program all the same;
`fence` between them keeps the compiler from rewriting across what eager execution keeps apart.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
)
from jax.sharding import AbstractMesh, AxisType, Mesh
from jaxtyping import Array

from namedshard import _jaxcompat as compat
from namedshard._init.traits import (
    BODY,
    CASTS,
    JIT,
    MANUAL,
    MOVEMENT,
    has_jaxpr,
    inner_jaxprs,
    is_float,
    jaxpr_traits,
    traits,
)


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
    """One operation: values are numbers, their avals are in `Graph.avals`.

    ``ctx`` holds the options that it was traced under. ``opened``: it is part of a jit that eager execution runs whole.
    ``mesh``: the one in force when it was traced, for operations that split their arrays over it.
    """

    primitive: Primitive
    params: dict[str, Any]
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    effects: bool
    ctx: Any
    opened: bool = False
    mesh: Mesh | None = None


Applied: TypeAlias = Op | JaxprEqn


@dataclasses.dataclass(slots=True, eq=False)
class Graph:
    """A traced function without nesting at the top."""

    avals: list[Any]
    ops: list[Op]
    inputs: tuple[int, ...]
    consts: dict[int, Any]
    outputs: tuple[Ref, ...]


_PLACING = frozenset({"sharding_constraint", "reshard", "mesh_cast", "layout_constraint", "device_put"})
"""Operations that change where values are, never the values. The plan alone says where results go."""

_SHARDING_PARAMS = frozenset({"out_sharding", "sharding"})

LARGE_JIT = 8
"""A jit with more results than this is taken for the model itself, not for one initialiser."""


def _body(primitive: Primitive, params: dict[str, Any], names: Iterable[str]) -> tuple[Jaxpr, Sequence[Any]] | None:
    if primitive.name not in names:
        return None
    inner = params["jaxpr" if primitive.name in JIT else BODY[primitive.name]]
    return (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())


def _aval(var: Any) -> Any:
    return var.aval


def _is_number(ref: Ref) -> TypeGuard[Constant]:
    return isinstance(ref, Constant) and not compat.is_key_array(ref.aval) and ref.aval.dtype != np.bool_


def _is_thin(eqn: JaxprEqn) -> bool:
    """True for a jit of ``jax.numpy`` that comes to the same when run as the operations in it.

    It computes once, and with no number of its own: a compiler that knows a divisor multiplies by its inverse.
    """
    if eqn.primitive.name not in JIT or not compat.is_inlined(eqn.params):
        return False
    body = _body(eqn.primitive, eqn.params, JIT)
    assert body is not None
    computing = [e for e in body[0].eqns if e.primitive.name not in MOVEMENT and e.primitive.name not in CASTS]
    literals = any(isinstance(v, Literal) for e in computing for v in e.invars)
    return len(computing) <= 1 and not literals and not any(has_jaxpr(e.params) for e in body[0].eqns)


def flatten(closed: ClosedJaxpr, *, keep_jits: bool, mesh: Mesh | None = None) -> Graph:
    """The operations that eager execution would dispatch, in order.

    Args:
        closed: The traced function.
        keep_jits: Keep every jit whole, as eager execution does. Otherwise those with many results are looked through.
        mesh: The mesh that was in force.
    """
    graph = Graph([], [], (), {}, ())

    def new(aval: Any) -> int:
        graph.avals.append(aval)
        return len(graph.avals) - 1

    def constant(value: Any, aval: Any) -> int:
        number = new(aval)
        graph.consts[number] = value
        return number

    def walk(jaxpr: Jaxpr, env: dict[Any, Ref], opened: bool) -> list[Ref]:
        def read(atom: Any) -> Ref:
            return Constant(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            opening = not keep_jits and len(eqn.outvars) > LARGE_JIT
            looked_through = [*BODY, *(JIT if opening or _is_thin(eqn) else ())]
            body = _body(eqn.primitive, eqn.params, looked_through)
            if eqn.primitive.name in _PLACING:
                env.update(zip(eqn.outvars, inputs, strict=True))
            elif eqn.primitive.name in CASTS and _is_number(inputs[0]) and is_float(eqn.outvars[0].aval):
                number, aval = inputs[0], _aval(eqn.outvars[0])
                env[eqn.outvars[0]] = Constant(np.asarray(number.value, number.aval.dtype).astype(aval.dtype), aval)
            elif body is not None:
                inner, consts = body
                known: dict[Any, Ref] = dict(zip(inner.invars, inputs, strict=True))
                for var, value in zip(inner.constvars, consts, strict=True):
                    known[var] = constant(value, var.aval)
                within = opened or (opening and eqn.primitive.name in JIT)
                env.update(zip(eqn.outvars, walk(inner, known, within), strict=True))
            else:
                outputs = tuple(new(v.aval) for v in eqn.outvars)
                env.update(zip(eqn.outvars, outputs, strict=True))
                over = mesh if traits(eqn.primitive, eqn.params, ()).manual else None
                effects = bool(eqn.effects)
                graph.ops.append(Op(eqn.primitive, eqn.params, tuple(inputs), outputs, effects, eqn.ctx, opened, over))
        return [read(v) for v in jaxpr.outvars]

    top = closed.jaxpr
    graph.inputs = tuple(new(v.aval) for v in top.invars)
    env: dict[Any, Ref] = dict(zip(top.invars, graph.inputs, strict=True))
    for var, value in zip(top.constvars, closed.consts, strict=True):
        env[var] = constant(value, var.aval)
    graph.outputs = tuple(walk(top, env, False))
    return graph


# --- running ----------------------------------------------------------------------------------------------------------


def apply(op: Applied, inputs: Sequence[Any], bits: BitsMaker | None, mesh: Mesh | None = None) -> list[Any]:
    """Run one operation on values or tracers; jits are opened, so that ``bits`` reaches the generators inside.

    ``mesh`` is the one that operations within were traced under, where they split their arrays over it.
    """
    primitive, params = op.primitive, op.params
    if primitive.name in _PLACING:
        return list(inputs)
    with compat.as_traced(op.ctx):
        body = _body(primitive, params, (*BODY, *JIT))
        if body is not None:
            return _evaluate(*body, inputs, bits, mesh)
        if bits is not None and primitive.name == "random_bits":
            made = bits(inputs[0], params["bit_width"], tuple(params["shape"]))
            if made is not None:
                return [made]
        if primitive.name not in MANUAL:
            params = _unplaced(params, mesh)
        elif mesh is not None and isinstance(params["mesh"], AbstractMesh):
            params = params | {"mesh": compat.twin(mesh, AxisType.Auto)}
        return compat.bind(primitive, params, inputs)


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], bits: BitsMaker | None, mesh: Mesh | None
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        out = apply(eqn, [read(v) for v in eqn.invars], bits, mesh)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _unplaced(value: Any, mesh: Mesh | None) -> Any:
    """Parameters without the shardings and memory spaces of the trace, which the plan alone decides."""
    if isinstance(value, dict):
        return {k: None if k in _SHARDING_PARAMS else _unplaced(v, mesh) for k, v in value.items()}
    if isinstance(value, tuple | list) and any(has_jaxpr(v) for v in value):
        return type(value)(_unplaced(v, mesh) for v in value)
    if isinstance(value, ClosedJaxpr) and _is_placed(value.jaxpr):
        avals = map(_aval, value.jaxpr.invars)
        inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return jax.make_jaxpr(lambda *xs: _evaluate(value.jaxpr, value.consts, xs, None, mesh))(*inputs)
    return value


_placed: weakref.WeakKeyDictionary[Jaxpr, bool] = weakref.WeakKeyDictionary()


def _is_placed(jaxpr: Jaxpr) -> bool:
    """Whether some value in it has a place of its own, in its type or by an operation."""
    found = _placed.get(jaxpr)
    if found is None:
        values = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
        found = _placed[jaxpr] = (
            any(compat.has_place(v.aval) for v in values)
            or any(eqn.primitive.name in _PLACING for eqn in jaxpr.eqns)
            or any(_is_placed(inner) for eqn in jaxpr.eqns for p in eqn.params.values() for inner in inner_jaxprs(p))
        )
    return found


def places_values(closed: ClosedJaxpr) -> bool:
    """Whether a traced function says where some of its values are to be."""
    return _is_placed(closed.jaxpr) or jaxpr_traits(closed.jaxpr).manual


_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def fence(x: Array, zero: Array) -> Array:
    """The same value, in a way that the compiler cannot see through.

    Within one program compilers contract ``a * b + c``, reassociate constants and skip roundings to bf16, which eager
    execution, one program per operation, never does. Adding to the bits a zero that is known at run time only stops
    them all, on every backend, and costs nothing beside memory traffic. (Exclusive or would do, but two of them around
    a choice between values cancel out.)

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
    return jax.lax.bitcast_convert_type(bits + zero.astype(unsigned), x.dtype)


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
            freeze_op(eqn),
            tuple(read(v) for v in eqn.invars),
            tuple((number(v), aval_key(v.aval)) for v in eqn.outvars),
        )
        for eqn in jaxpr.eqns
    )
    found = (heads, lines, tuple(read(v) for v in jaxpr.outvars))
    _frozen[jaxpr] = found
    return found


def freeze_op(op: Applied) -> Any:
    """A hashable stand-in for a primitive with its parameters; equal ones do the same to equal inputs."""
    primitive, params = op.primitive, op.params
    context = compat.context_key(op.ctx), op.mesh if isinstance(op, Op) else None
    if primitive.name in BODY:
        # The rest are rules of differentiation, which are new objects in every trace.
        return primitive, context, freeze(params[BODY[primitive.name]])
    return primitive, context, tuple((name, freeze(value)) for name, value in sorted(params.items()))


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
