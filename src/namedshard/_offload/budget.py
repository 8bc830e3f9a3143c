"""Runs an optimizer update with only a few of its host-resident states on the device at a time.

The update is traced once; its equations then run in the order of the states that they need, and each group of states
is tied, by an optimization barrier, to the states that the group before left in host memory, so that the compiler
cannot bring them all in at once. Values must be those of the update without barriers, and the compiler rounds
differently where it fuses differently. So only arrays in host memory pass through barriers, never values of the update,
and states that some value needs at once come in one group: no barrier lies between two values that are fused.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import Sharding

from namedshard import _jaxcompat as compat
from namedshard._place.local import change_memory

_MISSING = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Op:
    """An equation between numbered values, or literals; ``needs`` are the inputs that have to be there."""

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: range
    needs: frozenset[int]


def _body(eqn: Any) -> Any | None:
    """The jaxpr of a jitted function inside the update, if it has several results and no shardings; else None.

    Others are kept as calls: the compiler's first passes see a call, and round differently without it.
    """
    if eqn.primitive.name not in ("jit", "pjit") or len(eqn.outvars) == 1:
        return None
    placed = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return None if any(isinstance(s, Sharding) for s in placed) else eqn.params["jaxpr"]


class _IncrementalEvaluator:
    """Evaluates a jaxpr output by output. Each equation runs once, those with effects in their order."""

    def __init__(self, closed: Any):
        self._sizes: list[int] = []
        self._needs: list[frozenset[int]] = []
        self._values: dict[int, Any] = {}
        self._ops: list[_Op] = []
        self._done: set[int] = set()
        self._inputs = self._new(closed.jaxpr.invars)
        self._needs = [frozenset({n}) for n in self._inputs]
        self._effects = frozenset[int]()
        self._outputs = self._walk(closed, self._inputs)

    def _new(self, variables: Sequence[Any], needs: frozenset[int] = frozenset()) -> range:
        start = len(self._sizes)
        self._sizes.extend(getattr(v.aval, "size", 1) for v in variables)
        self._needs.extend(needs for _ in variables)
        return range(start, len(self._sizes))

    def _walk(self, closed: Any, given: Sequence[Any]) -> list[Any]:
        """Number the values of a jaxpr; a jit that takes the moments of all parameters is looked through."""
        constants = self._new(closed.jaxpr.constvars)
        self._values |= zip(constants, closed.consts, strict=True)
        env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, constants, strict=True))
        env |= zip(closed.jaxpr.invars, given, strict=True)
        for eqn in closed.jaxpr.eqns:
            inputs = tuple(v if isinstance(v, Literal) else env[v] for v in eqn.invars)
            if (body := _body(eqn)) is not None:
                env |= zip(eqn.outvars, self._walk(body, inputs), strict=True)
                continue
            needs = frozenset[int]().union(*map(self._needed, inputs))
            if eqn.effects:
                needs = self._effects = needs | self._effects
            outputs = self._new(eqn.outvars, needs)
            self._ops.append(_Op(eqn, inputs, outputs, needs))
            env |= zip(eqn.outvars, outputs, strict=True)
        return [v if isinstance(v, Literal) else env[v] for v in closed.jaxpr.outvars]

    def _needed(self, value: Any) -> frozenset[int]:
        return frozenset() if isinstance(value, Literal) else self._needs[value]

    def group_inputs(self, chosen: Sequence[int]) -> list[list[int]]:
        """The chosen inputs in sets that some value needs at once, such as the two moments of a parameter.

        Inputs that reach others only through a scalar (a global norm) needn't be on the device at once.
        """
        of: dict[int, frozenset[int]] = {n: frozenset({n}) for n in chosen}
        sets = dict(of)
        for op in self._ops:
            inputs = [of.get(v, frozenset()) for v in op.inputs if not isinstance(v, Literal) and self._sizes[v] > 1]
            merged = frozenset[int]().union(*inputs)
            of |= dict.fromkeys(op.outputs, merged)
            whole = frozenset[int]().union(*(sets[n] for n in merged))
            sets |= dict.fromkeys(whole, whole)
        return [sorted(s) for s in dict.fromkeys(sets[n] for n in chosen)]

    def set_input(self, n: int, value: Any) -> None:
        """Provide an input."""
        self._values[n] = value

    def _available(self) -> set[int]:
        return {n for n in self._inputs if n in self._values}

    def ready_outputs(self) -> list[int]:
        """Outputs whose inputs are all set."""
        available = self._available()
        return [n for n, v in enumerate(self._outputs) if self._needed(v) <= available]

    def evaluate(self, outputs: Sequence[int]) -> list[Any]:
        """The values of some outputs that are ready, and all effects that are."""
        available = self._available()
        wanted = {v for n in outputs if not isinstance(v := self._outputs[n], Literal)}
        needed: list[int] = []
        for n in reversed(range(len(self._ops))):
            op = self._ops[n]
            effect = bool(op.eqn.effects) and op.needs <= available
            if n not in self._done and (effect or not wanted.isdisjoint(op.outputs)):
                needed.append(n)
                wanted |= {v for v in op.inputs if not isinstance(v, Literal)}
        for n in reversed(needed):
            op = self._ops[n]
            out = compat.run_equation(op.eqn, [self._read(v) for v in op.inputs])
            self._values |= zip(op.outputs, out, strict=True)
            self._done.add(n)
        return [self._read(self._outputs[n]) for n in outputs]

    def _read(self, value: Any) -> Any:
        return value.val if isinstance(value, Literal) else self._values[value]


def _groups(sets: Sequence[Sequence[int]], sizes: Mapping[int, int], budget: int) -> list[list[int]]:
    groups: list[list[int]] = []
    used = 0
    for together in sets:
        # A new state stands beside the old one until the old one is dropped.
        size = 2 * sum(sizes[i] for i in together)
        if groups and used + size <= budget:
            groups[-1].extend(together)
            used += size
        else:
            groups.append(list(together))
            used = size
    return groups


def update_within(
    run: Callable[[Sequence[Any]], tuple[Any, Any]],
    values: Sequence[Any],
    sizes: Mapping[int, int],
    memory_kind: str,
    budget: int,
) -> tuple[Any, Any]:
    """``run`` on a state with the chosen leaves moved in, and the new ones moved out, group by group.

    Args:
        run: From the state's leaves, all on the device, to (updates, new state of the same structure).
        values: The state's leaves, all arrays; the chosen ones in host memory.
        sizes: Which leaves live in host memory, with their bytes on each device, or at most so many.
        memory_kind: Where they live.
        budget: Bytes of states, old and new, brought to a device at a time; a single parameter's may need more.

    Returns:
        (updates, new state), with the chosen leaves of the new state in host memory.
    """
    chosen = list(sizes)
    like = list(values)
    for i, x in zip(chosen, change_memory([values[i] for i in chosen], "device"), strict=True):
        like[i] = x
    closed, shape = jax.make_jaxpr(lambda *leaves: run(leaves), return_shape=True)(*like)
    evaluator = _IncrementalEvaluator(closed)
    first_state = len(jax.tree_util.tree_leaves(shape[0]))
    outputs: list[Any] = [_MISSING] * len(closed.jaxpr.outvars)
    for i, x in enumerate(values):
        if i not in chosen:
            evaluator.set_input(i, x)
    back: list[Any] = []
    for group in _groups(evaluator.group_inputs(chosen), sizes, budget):
        incoming: Any = [values[i] for i in group]
        if back:
            incoming, _ = jax.lax.optimization_barrier((incoming, back))
        for i, x in zip(group, change_memory(incoming, "device"), strict=True):
            evaluator.set_input(i, x)
        left: list[Any] = []
        ready = [n for n in evaluator.ready_outputs() if outputs[n] is _MISSING]
        for n, x in zip(ready, evaluator.evaluate(ready), strict=True):
            outputs[n] = x
            if n - first_state in chosen:
                (outputs[n],) = change_memory([x], memory_kind)
                left.append(outputs[n])
        back = left or back
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), outputs)
