"""What `named_jit`'s ``lower`` gives: JAX's own stages, called with the user's arguments."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from namedshard._errors import MismatchError, message
from namedshard._jit.arguments import compare, mismatch_message
from namedshard._jit.donation import check_not_deleted, check_shared, is_concrete
from namedshard._jit.program import CHOSEN, Output
from namedshard._jit.signature import same_structure, static_key
from namedshard._jit.store import CallPlan
from namedshard._place.route import placement_of
from namedshard._place.shard import place_leaves
from namedshard._plan.mesh import require_attached


def mesh_of(x: Any) -> Any:
    """The mesh that a sharding, or the sharding of a ``jax.ShapeDtypeStruct``, is over."""
    return getattr(x.sharding if isinstance(x, jax.ShapeDtypeStruct) else x, "mesh", None)


def _given(stage: Any) -> list[Any]:
    """The shardings of a compiled program's arguments; None stands for those that nothing depends on."""
    return jax.tree_util.tree_leaves(stage.input_shardings, is_leaf=lambda x: x is None)


def _place_text(sharding: Any) -> str:
    if sharding is None:
        return "not used"
    return f"{getattr(sharding, 'spec', sharding)} in {sharding.memory_kind or 'device'!r}"


class _Stage:
    """Passes everything else on to JAX's own stage. ``bound`` are leading arguments that calls leave out."""

    def __init__(self, stage: Any, call: CallPlan, prefix: tuple[Any, ...], bound: tuple[Any, ...]):
        self._stage = stage
        self._call = call
        self._program = call.program
        self._prefix = prefix
        self._bound = bound

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class Compiled(_Stage):
    """A compiled program that takes the arguments it was lowered for; all else as ``jax.stages.Compiled``."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            TypeError: The arguments have another structure, other static values, shapes or dtypes than those it was
                lowered for.
            MismatchError: Committed arguments are not placed as it needs them.
            DonationError: A donated argument is passed twice, or was donated before.
            UnattachedDevicesError: It was compiled for a `topology_mesh`.
        """
        program, reshards = self._program, self._call.reshards
        require_attached(program.name, self._mesh)
        leaves, treedef = jax.tree_util.tree_flatten((*self._prefix, (*self._bound, *args), kwargs))
        self._check_structure(leaves, treedef)
        arrays = program.select(leaves)
        check_not_deleted(program, arrays, (n for n, x in enumerate(arrays) if is_concrete(x)))
        if program.donate:
            check_shared(program, arrays)
        # Where it was lowered for structs, an array that is committed elsewhere is a mismatch, as in a call.
        moves = [
            (n, want)
            for n, want in self._call.moves
            if n in reshards or not placement_of(arrays[n], staging=False).committed
        ]
        values = place_leaves(program.paths, arrays, moves, program.donate) if moves else arrays
        try:
            out = self._stage(*values)
        except (TypeError, ValueError):
            self._check_types(values)
            self._check_places(values)
            raise
        return program.finish(values, out)

    @functools.cached_property
    def _mesh(self) -> Any:
        """The mesh it was lowered for, in context or by its arguments."""
        places = jax.tree_util.tree_leaves((self._stage.input_shardings, self._stage.output_shardings))
        return next((m for m in (self._program.mesh, *map(mesh_of, places)) if m is not None), None)

    def _check_structure(self, leaves: Sequence[Any], treedef: Any) -> None:
        program = self._program
        if not same_structure(treedef, program.held, program.treedef):
            lines = [f"lowered for {program.treedef}", f"called with {treedef}"]
            raise self._other_arguments("the arguments have another structure", lines)
        arrays = set(range(len(leaves)) if program.indices is None else program.indices)
        differ = [
            f"{path}: lowered for {was!r}, called with {now!r}"
            for i, (path, was, now) in enumerate(zip(program.names, program.statics, leaves, strict=True))
            if i not in arrays and static_key(was) != static_key(now)
        ]
        if differ:
            raise self._other_arguments("static arguments have other values", differ)

    def _check_types(self, values: Sequence[Any]) -> None:
        wanted = jax.tree_util.tree_leaves(self._stage.in_avals)
        lines = [
            f"{path}: lowered for {want.str_short()}, called with {jax.typeof(x).str_short()}"
            for path, want, x in zip(self._program.paths, wanted, values, strict=True)
            if (want.shape, want.dtype) != (jax.typeof(x).shape, jax.typeof(x).dtype)
        ]
        if lines:
            what = f"{len(lines)} of {len(wanted)} arguments have other types"
            raise self._other_arguments(what, lines) from None

    def _other_arguments(self, what: str, lines: Sequence[str]) -> TypeError:
        headline = f"{self._program.name}: {what} than those it was lowered for"
        return TypeError(message(headline, lines, fix="lower it again for these arguments"))

    def _check_places(self, values: Sequence[Any]) -> None:
        found = [
            compare(path, x, want, want.mesh, want)
            for path, want, x in zip(self._program.paths, _given(self._stage), values, strict=True)
            if getattr(x, "committed", False) and isinstance(want, NamedSharding) and isinstance(want.mesh, Mesh)
        ]
        if found := [mismatch for mismatch in found if mismatch is not None]:
            fixes = ["place them as they were when it was lowered, or lower it again for these arguments"]
            raise MismatchError(mismatch_message(self._program.name, found, len(values), fixes)) from None

    def outputs(self) -> tuple[Output, ...]:
        """For each array output, what its mapping asks for and where it comes out."""
        program = self._program
        got = jax.tree_util.tree_leaves(self._stage.output_shardings)
        for n, want in program.empty:
            got[n] = want
        for n in program.mislabelled:
            got[n] = got[n].with_memory_kind("pinned_host")
        return tuple(
            dataclasses.replace(o, got=s, by=program.placed_by(n, self._call.like))
            for n, (o, s) in enumerate(zip(program.outputs, got, strict=True))
        )

    def explain(self) -> str:
        """Each argument and each output in a line: its path, spec and memory kind, and who decided on the output's."""
        arguments = zip(self._program.paths, _given(self._stage), strict=True)
        outputs = self.outputs()
        chosen = sum(o.by == CHOSEN for o in outputs)
        lines = [f"argument {path}: {_place_text(s)}" for path, s in arguments]
        lines += [f"output {o.path}: {_place_text(o.got)}, {o.by}" for o in outputs]
        noun = f"output{'' if len(outputs) == 1 else 's'} {'is' if chosen == 1 else 'are'}"
        return message(f"{self._program.name}: {chosen} of {len(outputs)} {noun} placed by the compiler", lines)


class Lowered(_Stage):
    """A lowered program; all else as ``jax.stages.Lowered``."""

    def compile(self, compiler_options: Any = None) -> Compiled:
        """Compile it."""
        with self._program.counting():
            stage = self._stage.compile(compiler_options)
        if self._program.has_host_outputs:
            self._program.check_memory(stage)
        return Compiled(stage, self._call, self._prefix, self._bound)
