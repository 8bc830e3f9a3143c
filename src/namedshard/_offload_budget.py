"""An optimizer update whose host-resident states visit the device a few at a time.

The update is traced once; its equations then run in the order of the states that they need, and each group of states
is tied, by an optimization barrier, to the results of the group before, so that the compiler cannot bring them all in
at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from namedshard import _jaxcompat as compat
from namedshard._moves import change_memory

_MISSING = object()


class _Program:
    """A traced function that is run output by output; each equation runs once."""

    def __init__(self, closed: Any):
        self._jaxpr = closed.jaxpr
        self._env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._needs: dict[Any, frozenset[int]] = {v: frozenset({n}) for n, v in enumerate(closed.jaxpr.invars)}
        for eqn in closed.jaxpr.eqns:
            needs = frozenset[int]().union(*(self.needs(v) for v in eqn.invars))
            self._needs |= dict.fromkeys(eqn.outvars, needs)

    def needs(self, var: Any) -> frozenset[int]:
        """The inputs that a value depends on."""
        return frozenset() if isinstance(var, Literal) else self._needs.get(var, frozenset())

    def give(self, n: int, value: Any) -> None:
        """Provide an input."""
        self._env[self._jaxpr.invars[n]] = value

    def ready(self) -> list[int]:
        """Outputs whose inputs are all there."""
        there = {n for n, v in enumerate(self._jaxpr.invars) if v in self._env}
        return [n for n, v in enumerate(self._jaxpr.outvars) if self.needs(v) <= there]

    def run(self, outputs: Sequence[int]) -> list[Any]:
        """The values of some outputs."""
        wanted = {v for n in outputs if not isinstance(v := self._jaxpr.outvars[n], Literal)}
        needed: list[Any] = []
        for eqn in reversed(self._jaxpr.eqns):
            if any(v in wanted and v not in self._env for v in eqn.outvars):
                needed.append(eqn)
                wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
        for eqn in reversed(needed):
            out = compat.run_equation(eqn, [self._read(v) for v in eqn.invars])
            self._env |= zip(eqn.outvars, out, strict=True)
        return [self._read(self._jaxpr.outvars[n]) for n in outputs]

    def _read(self, var: Any) -> Any:
        return var.val if isinstance(var, Literal) else self._env[var]


def _groups(values: Sequence[Any], chosen: Sequence[int], budget: int) -> list[list[int]]:
    groups: list[list[int]] = []
    used = 0
    for i in chosen:
        # A new state stands beside the old one until the old one is dropped.
        size = 2 * values[i].size * values[i].dtype.itemsize
        if groups and used + size <= budget:
            groups[-1].append(i)
            used += size
        else:
            groups.append([i])
            used = size
    return groups


def update_within(
    run: Callable[[Sequence[Any]], tuple[Any, Any]],
    values: Sequence[Any],
    chosen: Sequence[int],
    memory_kind: str,
    budget: int,
) -> tuple[Any, Any]:
    """``run`` on a state with the chosen leaves moved in, and the new ones moved out, group by group.

    Args:
        run: From the state's leaves, all on the device, to (updates, new state of the same structure).
        values: The state's leaves, all arrays; the chosen ones in host memory.
        chosen: Which leaves live in host memory.
        memory_kind: Where they live.
        budget: Bytes of states, old and new, that may be on the device at a time; a single state may need more.

    Returns:
        (updates, new state), with the chosen leaves of the new state in host memory.
    """
    like = list(values)
    for i, x in zip(chosen, change_memory([values[i] for i in chosen], "device"), strict=True):
        like[i] = x
    closed, shape = jax.make_jaxpr(lambda *leaves: run(leaves), return_shape=True)(*like)
    program = _Program(closed)
    first_state = len(jax.tree_util.tree_leaves(shape[0]))
    outputs: list[Any] = [_MISSING] * len(closed.jaxpr.outvars)
    for i, x in enumerate(values):
        if i not in chosen:
            program.give(i, x)
    token: Any = None
    for group in _groups(values, chosen, budget):
        incoming: Any = [values[i] for i in group]
        if token is not None:
            incoming, _ = jax.lax.optimization_barrier((incoming, token))
        for i, x in zip(group, change_memory(incoming, "device"), strict=True):
            program.give(i, x)
        ready = [n for n in program.ready() if outputs[n] is _MISSING]
        for n, x in zip(ready, program.run(ready), strict=True):
            outputs[n] = change_memory([x], memory_kind)[0] if n - first_state in chosen else x
        token = [outputs[n] for n in ready]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), outputs)
