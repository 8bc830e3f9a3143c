"""Runs an optimizer update with only a few of its host-resident states on the device at a time.

The update is traced once; its equations then run in the order of the states that they need, and each group of states
is tied, by an optimization barrier, to the states that the group before left in host memory, so that the compiler
cannot bring them all in at once. Values must be those of the update without barriers, and the compiler rounds
differently where it fuses differently. So only arrays in host memory pass through barriers, never values of the update,
and states that some value needs at once come in one group: no barrier lies between two values that are fused.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import Sharding

from namedshard import _jaxcompat as compat
from namedshard._place.local import change_memory


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Op:
    """An equation between numbered values; ``needs`` are the inputs that have to be there."""

    eqn: Any
    inputs: Sequence[int]
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
        self._inputs = self._new(closed.jaxpr.invars)
        self._needs = [frozenset({n}) for n in self._inputs]
        self._effects = frozenset[int]()
        self._outputs = self._walk(closed, self._inputs)

    def _new(self, variables: Sequence[Any], needs: frozenset[int] = frozenset()) -> range:
        start = len(self._sizes)
        self._sizes.extend(getattr(v.aval, "size", 1) for v in variables)
        self._needs.extend(needs for _ in variables)
        return range(start, len(self._sizes))

    def _constants(self, variables: Sequence[Any], values: Sequence[Any]) -> range:
        numbers = self._new(variables)
        self._values |= zip(numbers, values, strict=True)
        return numbers

    def _walk(self, closed: Any, given: Sequence[int]) -> list[int]:
        """Number the values of a jaxpr; a jit that takes the moments of all parameters is looked through."""
        jaxpr = closed.jaxpr
        env: dict[Any, int] = dict(zip(jaxpr.constvars, self._constants(jaxpr.constvars, closed.consts), strict=True))
        env |= zip(jaxpr.invars, given, strict=True)

        def numbers(atoms: Sequence[Any]) -> list[int]:
            return [self._constants([v], [v.val])[0] if isinstance(v, Literal) else env[v] for v in atoms]

        for eqn in jaxpr.eqns:
            inputs = numbers(eqn.invars)
            if (body := _body(eqn)) is not None:
                env |= zip(eqn.outvars, self._walk(body, inputs), strict=True)
                continue
            needs = frozenset[int]().union(*(self._needs[v] for v in inputs))
            if eqn.effects:
                needs = self._effects = needs | self._effects
            outputs = self._new(eqn.outvars, needs)
            self._ops.append(_Op(eqn, inputs, outputs, needs))
            env |= zip(eqn.outvars, outputs, strict=True)
        return numbers(jaxpr.outvars)

    def group_inputs(self, chosen: Sequence[int]) -> list[list[int]]:
        """The chosen inputs in sets that some value needs at once, such as the two moments of a parameter.

        Inputs that reach others only through a scalar (a global norm) needn't be on the device at once.
        """
        of: dict[int, frozenset[int]] = {n: frozenset({n}) for n in chosen}
        sets = dict(of)
        for op in self._ops:
            merged = frozenset[int]().union(*(of.get(v, frozenset()) for v in op.inputs if self._sizes[v] > 1))
            of |= dict.fromkeys(op.outputs, merged)
            whole = frozenset[int]().union(*(sets[n] for n in merged))
            sets |= dict.fromkeys(whole, whole)
        return [sorted(s) for s in dict.fromkeys(sets[n] for n in chosen)]

    def set_inputs(self, inputs: Iterable[tuple[int, Any]]) -> None:
        self._values.update(inputs)

    def evaluate_ready(self, done: Container[int]) -> dict[int, Any]:
        """The outputs whose inputs are all set, apart from those ``done``, by number; runs all effects that can be."""
        available = {n for n in self._inputs if n in self._values}
        ready = [n for n, v in enumerate(self._outputs) if n not in done and self._needs[v] <= available]
        wanted = {self._outputs[n] for n in ready}
        needed: list[_Op] = []
        for op in reversed(self._ops):
            if (op.eqn.effects and op.needs <= available) or not wanted.isdisjoint(op.outputs):
                needed.append(op)
                wanted.update(op.inputs)
        for op in reversed(needed):
            out = compat.run_equation(op.eqn, [self._values[v] for v in op.inputs])
            self._values |= zip(op.outputs, out, strict=True)
        executed = set(needed)
        self._ops = [op for op in self._ops if op not in executed]
        return {n: self._values[self._outputs[n]] for n in ready}


def _groups(sets: Sequence[Sequence[int]], sizes: Mapping[int, int], budget: int) -> list[list[int]]:
    groups: list[list[int]] = []
    used = 0
    for together in sets:
        # New states stand beside the old ones until they have left, and meanwhile the next group comes in.
        size = 3 * sum(sizes[i] for i in together)
        if not groups or used + size > budget:
            groups.append([])
            used = 0
        groups[-1] += together
        used += size
    return groups


def update_within(
    run: Callable[[Sequence[Any]], tuple[Any, Any]],
    values: Sequence[Any],
    sizes: Mapping[int, int],
    memory_kind: str,
    budget: int,
) -> tuple[Any, Any]:
    """``run`` on a state with the chosen leaves moved in, and the new ones moved out, group by group.

    ``run`` goes from the state's leaves on the device to (updates, new state of the same structure). ``sizes`` tells
    which ``values`` live in host memory, with their bytes on each device (or at most so many), and ``budget`` how many
    bytes of old and new states are brought to a device at a time; a single parameter's may need more.
    """
    chosen = list(sizes)
    on_device = dict(zip(chosen, change_memory([values[i] for i in chosen], "device"), strict=True))
    like = [on_device.get(i, x) for i, x in enumerate(values)]
    closed, shape = jax.make_jaxpr(lambda *leaves: run(leaves), return_shape=True)(*like)
    evaluator = _IncrementalEvaluator(closed)
    evaluator.set_inputs((i, x) for i, x in enumerate(values) if i not in sizes)
    first_state = len(jax.tree_util.tree_leaves(shape[0]))
    outputs: dict[int, Any] = {}
    back: list[Any] = []
    for group in _groups(evaluator.group_inputs(chosen), sizes, budget):
        incoming: Any = [values[i] for i in group]
        if back:
            incoming, _ = jax.lax.optimization_barrier((incoming, back))
        evaluator.set_inputs(zip(group, change_memory(incoming, "device"), strict=True))
        ready = evaluator.evaluate_ready(outputs)
        leaving = [n for n in ready if n - first_state in sizes]
        left = change_memory([ready[n] for n in leaving], memory_kind)
        outputs |= ready | dict(zip(leaving, left, strict=True))
        back = left or back
    flat = [outputs[n] for n in range(len(outputs))]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), flat)
