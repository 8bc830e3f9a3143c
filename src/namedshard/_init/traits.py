"""PURE. What operations do to values: which of them may come out otherwise split up, or beside others."""

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive  # pyright: ignore[reportPrivateImportUsage]

from namedshard import _jaxcompat as compat

BODY = {
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

MANUAL = frozenset({"shard_map"})
"""Operations that split their arrays by themselves."""

JIT = frozenset({"jit", "pjit"})


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


CASTS = frozenset({"convert_element_type"})


def has_jaxpr(value: Any) -> bool:
    """True if a parameter holds some jaxpr."""
    return any(True for _ in inner_jaxprs(value))


def inner_jaxprs(value: Any) -> Iterable[Jaxpr]:
    """The jaxprs that a parameter holds, or many parameters."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from inner_jaxprs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from inner_jaxprs(item)


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """What decides whether an operation's values can depend on how its arrays are split.

    ``rounds``: it adds up floating values in an order that a compiler chooses. ``transcendental``: it uses functions
    that compilers approximate, on CPUs by other instructions at the ends of rows than within. ``manual``: it splits its
    arrays by itself, over devices of its own choice. ``contracts``: it adds two products, and a compiler may leave
    either unrounded.
    """

    rounds: bool
    transcendental: bool
    manual: bool = False
    contracts: bool = False

    def __or__(self, other: "Traits") -> "Traits":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traits(*(a or b for a, b in pairs))


def single_rounding(primitive: Primitive, params: dict[str, Any], avals: Sequence[Any]) -> bool:
    """Whether an operation's values are one and the same however and beside whatever it is compiled.

    True for those without floating values, and for one addition, product and the like.
    """
    found = traits(primitive, params, avals)
    floats = any(map(is_float, avals)) or any(map(_computes_floats, inner_jaxprs(params)))
    return not floats or not (found.rounds or found.transcendental or found.manual or has_jaxpr(params))


def _computes_floats(jaxpr: Jaxpr) -> bool:
    inner = (j for eqn in jaxpr.eqns for j in inner_jaxprs(eqn.params))
    return any(is_float(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars) or any(map(_computes_floats, inner))


_seen: weakref.WeakKeyDictionary[Jaxpr, Traits] = weakref.WeakKeyDictionary()


def is_float(aval: Any) -> bool:
    """True for floating and complex types."""
    return hasattr(aval, "dtype") and not compat.is_key_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def traits(primitive: Primitive, params: dict[str, Any], avals: Iterable[Any]) -> Traits:
    """The traits of one operation, given the avals of its inputs and outputs."""
    inner = [jaxpr for value in params.values() for jaxpr in inner_jaxprs(value)]
    if primitive.name in MANUAL:
        return Traits(False, False, manual=True)
    out = Traits(False, primitive.name in _TRANSCENDENTAL)
    called = primitive.name in JIT or primitive.name in BODY
    if primitive.name not in _EXACT and not called and any(is_float(a) for a in avals):
        out |= Traits(True, False)
    for jaxpr in inner:
        out |= jaxpr_traits(jaxpr)
    return out


def jaxpr_traits(jaxpr: Jaxpr) -> Traits:
    """The traits of all operations in it."""
    found = _seen.get(jaxpr)
    if found is None:
        found = Traits(False, False)
        products: set[Any] = set()
        for eqn in jaxpr.eqns:
            avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
            found |= traits(eqn.primitive, eqn.params, avals)
            factors = [v for v in eqn.invars if not isinstance(v, Literal) and v in products]
            if eqn.outvars and is_float(eqn.outvars[0].aval):
                if eqn.primitive.name == "mul" or (factors and eqn.primitive.name in MOVEMENT):
                    products.update(eqn.outvars)
                found |= Traits(False, False, contracts=eqn.primitive.name in ("add", "sub") and len(factors) == 2)
        _seen[jaxpr] = found
    return found
