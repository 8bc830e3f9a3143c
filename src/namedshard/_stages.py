"""What `named_jit`'s ``lower`` gives: JAX's own stages, called with the user's arguments."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from namedshard._errors import count_of, message
from namedshard._place import place_leaves
from namedshard._programs import Program


@dataclasses.dataclass(frozen=True, slots=True)
class OutputPlacement:
    """One output of a compiled function.

    Attributes:
        path: The leaf path in the result.
        asked: The spec that its mapping asks for, or None where the compiler chose.
        got: The sharding it comes out with.
    """

    path: str
    asked: Any
    got: Any


class _Stage:
    """Passes everything else on to JAX's own stage."""

    def __init__(self, stage: Any):
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class Compiled(_Stage):
    """A compiled program that takes the arguments it was lowered for; all else as ``jax.stages.Compiled``."""

    def __init__(self, stage: Any, lowered: "Lowered"):
        super().__init__(stage)
        self._lowered = lowered

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            TypeError: The arguments have another structure than those it was lowered for.
        """
        program = self._lowered.program
        tree = (*self._lowered.prefix, args, kwargs)
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        if treedef != program.treedef:
            raise TypeError(
                message(
                    f"{program.name}: the arguments have another structure than those it was lowered for",
                    [f"lowered for {program.treedef}", f"called with {treedef}"],
                    fix="lower it again for these arguments",
                )
            )
        arrays = leaves if program.arrays is None else [leaves[i] for i in program.arrays]
        if self._lowered.moves:
            arrays = place_leaves([f"argument {n}" for n in range(len(arrays))], arrays, self._lowered.moves)
        return program.finish(self._stage(*arrays))

    def outputs(self) -> tuple[OutputPlacement, ...]:
        """For each array output, what its mapping asks for and what the compiler chose."""
        got = jax.tree_util.tree_leaves(self._stage.output_shardings)
        return tuple(
            OutputPlacement(o.path, None if o.asked is None else o.asked.spec, s)
            for o, s in zip(self._lowered.program.outputs, got, strict=True)
        )

    def explain(self) -> str:
        """Each output in a line: its path, the spec it comes out with, and who decided."""
        placements = self.outputs()
        chosen = sum(p.asked is None for p in placements)
        lines: list[str] = []
        for p in placements:
            by = "as mapped" if p.asked is not None else "chosen by the compiler"
            lines.append(f"{p.path}: {getattr(p.got, 'spec', p.got)} ({by})")
        return message(f"{count_of(chosen, len(placements))} without names: placed by the compiler", lines)


class Lowered(_Stage):
    """A lowered program; all else as ``jax.stages.Lowered``."""

    def __init__(self, stage: Any, program: Program, moves: Sequence[tuple[int, Any]], prefix: tuple[Any, ...]):
        super().__init__(stage)
        self.program = program
        self.moves = moves
        self.prefix = prefix

    def compile(self, compiler_options: Any = None) -> Compiled:
        """Compile it."""
        return Compiled(self._stage.compile(compiler_options), self)
