"""One flat ``jax.jit`` per signature of a compiled function, and what its trace tells."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from namedshard import _jaxcompat as compat
from namedshard._donation import check_donatable
from namedshard._errors import IgnoredTransferError, message
from namedshard._jaxprs import ignored_transfers
from namedshard._leaves import Leaf, is_array_like, named_leaves
from namedshard._mapping import AxisMapping, axis_mapping
from namedshard._mesh import MeshLike, manual_axes, resolve_mesh
from namedshard._place import shard
from namedshard._plan import plan_leaves
from namedshard._statics import static_key
from namedshard._unflatten import Builder, unflattener
from namedshard._validate import traced_devices


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One array output: its path, what the mapping asks for (None: whatever the compiler chose), and its type."""

    path: str
    asked: NamedSharding | None
    shape: tuple[int, ...]
    dtype: Any
    memory_kind: str


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """One structure, one set of statics and avals, one mapping, one mesh.

    ``arrays`` numbers the argument leaves that go in; None means all of them.
    """

    name: str
    treedef: jax.tree_util.PyTreeDef
    arrays: tuple[int, ...] | None
    donate: tuple[int, ...]
    jitted: Any = None
    traces: int = 0
    checked: bool = False
    outputs: tuple[Output, ...] = ()
    build: Builder | None = None
    out_treedef: jax.tree_util.PyTreeDef | None = None

    def finish(self, out: Sequence[Any]) -> Any:
        """The function's result from the flat outputs."""
        assert self.build is not None
        return self.build(out)


def _aval_key(x: Any, placed: NamedSharding | None) -> Hashable:
    if isinstance(x, jax.core.Tracer):
        return x.aval
    weak = bool(getattr(x, "weak_type", False))
    space = compat.memory_space_of(x) if isinstance(x, jax.Array) else compat.DEVICE_SPACE
    typed: Hashable = None
    if placed is not None:
        typed = (placed.mesh.abstract_mesh, placed.spec) if compat.any_explicit(placed.mesh) else None
        space = compat.space_of_kind(placed.memory_kind)
    elif isinstance(x, jax.Array):
        typed = compat.explicit_type(x)
    elif getattr(x, "sharding", None) is not None:
        typed = x.sharding
    return tuple(x.shape), jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True), weak, space, typed


def program_key(walked: Sequence[Leaf], placed: Sequence[NamedSharding | None]) -> tuple[Hashable, ...]:
    """What a trace depends on, leaf by leaf: numpy or jax, committed or not, makes no difference to it."""
    return tuple(
        _aval_key(leaf.value, want) if is_array_like(leaf.value) else static_key(leaf.value, leaf.path)
        for leaf, want in zip(walked, placed, strict=True)
    )


def make_program(
    name: str,
    fn: Callable[..., Any] | None,
    treedef: jax.tree_util.PyTreeDef,
    leaves: Sequence[Any],
    donate_mask: Sequence[bool],
    mapping: AxisMapping | None,
    out_mapping: AxisMapping | None,
    jit_kwargs: dict[str, Any],
) -> Program:
    """A program that is traced at its first use. ``fn`` None: the function is part of the tree."""
    arrays = tuple(i for i, x in enumerate(leaves) if is_array_like(x))
    statics = tuple(None if is_array_like(x) else x for x in leaves)
    donate = tuple(n for n, i in enumerate(arrays) if donate_mask[i])
    program = Program(name, treedef, None if len(arrays) == len(leaves) else arrays, donate)

    def flat(*values: Any) -> tuple[Any, ...]:
        program.traces += 1
        full = list(statics)
        for i, x in zip(arrays, values, strict=True):
            full[i] = x
        whole = jax.tree_util.tree_unflatten(treedef, full)
        call, args, kwargs = whole if fn is None else (fn, *whole)
        if mapping is None:
            return _record(program, call(*args, **kwargs), out_mapping)
        with axis_mapping(mapping):
            return _record(program, call(*args, **kwargs), out_mapping)

    flat.__name__ = name.rsplit(".", 1)[-1]
    flat.__qualname__ = name
    program.jitted = jax.jit(flat, donate_argnums=donate, **jit_kwargs)
    return program


def _is_output_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _record(program: Program, out: Any, out_mapping: AxisMapping | None) -> tuple[Any, ...]:
    """Constrain the outputs, and note their structure and what was asked of them."""
    leaves, treedef = jax.tree_util.tree_flatten(out)
    walked = named_leaves(out)
    mesh = resolve_mesh(None)
    asked: list[NamedSharding | None] = [None] * len(leaves)
    if mesh is not None and (out_mapping is not None or any(leaf.own is not None for leaf in walked)):
        mapping = out_mapping if out_mapping is not None else AxisMapping()
        plan = plan_leaves(walked, treedef, mapping, mesh, memory_kind=None, manual=manual_axes())
        asked = [plan.sharding_of(leaf) for leaf in plan.leaves]
        leaves = jax.tree_util.tree_leaves(shard(out, mapping, mesh))
    picked = [i for i, x in enumerate(leaves) if _is_output_array(x)]
    values = tuple(jnp.asarray(leaves[i]) if not isinstance(leaves[i], jax.Array) else leaves[i] for i in picked)
    program.outputs = tuple(
        Output(walked[i].path or "the result", asked[i], tuple(x.shape), x.dtype, compat.memory_kind_of_traced(x))
        for i, x in zip(picked, values, strict=True)
    )
    program.out_treedef = treedef
    build = unflattener(treedef)
    if len(picked) == len(leaves):
        program.build = build
    else:
        statics = [None if _is_output_array(x) else x for x in leaves]

        def with_statics(arrays: Sequence[Any]) -> Any:
            full = list(statics)
            for i, x in zip(picked, arrays, strict=True):
                full[i] = x
            return build(full)

        program.build = with_statics
    return values


def check_trace(program: Program, values: Sequence[Any], mesh: MeshLike | None, paths: Sequence[str]) -> None:
    """Trace, and raise for what the compiler would get wrong without a word."""
    traced = program.jitted.trace(*values)
    devices = traced_devices(values, mesh)
    found = ignored_transfers(traced.jaxpr.jaxpr, devices) if devices is not None else []
    if found and devices is not None:
        noun = "device_put" if len(found) == 1 else "device_puts"
        raise IgnoredTransferError(
            message(
                f"{program.name}: {len(found)} {noun} in traced code would be ignored by the compiler, which runs on"
                f" {devices[0].platform} devices {[d.id for d in devices]}",
                [f"{t.source}: to {t.target}" for t in found],
                fix="move the result after the call; for host memory, use"
                ' ns.shard(..., memory_kind="pinned_host") or jax.device_put(x, jax.memory.Space.Host)',
            )
        )
    outputs = [(o.shape, o.dtype, o.asked, o.memory_kind) for o in program.outputs]
    check_donatable(program.name, values, program.donate, outputs, paths)
    program.checked = True
