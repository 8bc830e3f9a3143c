"""PURE. Which operations of a traced initialiser go together into one program, and where its results are wanted.

A program ends in what is wanted: an output of the function, or a large value that several programs need. What leads up
to it belongs to it as long as nothing else needs it; small values come from the `Tape`, constants are made anew in each
program that uses them.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._init_jaxpr import Constant, Graph, Op, Ref, Traits, aval_key, freeze, freeze_op, traits
from namedshard._init_tape import Tape, has_words, is_small, word_count
from namedshard._mesh import MeshLike

_FILLS = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type"})

VECTOR = 16
"""On CPUs, rows whose length is a multiple of this are worked on by vector instructions from end to end."""

_LEAST_LOCAL, _MOST_LOCAL = 256 << 10, 64 << 20
_NOWHERE = object()


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One program to run: which words and arrays go in, which values come out, and where.

    ``key`` tells what is compiled, without the values' numbers. ``local``: the values could depend on how arrays are
    split, so it runs operation by operation on one device, as eager execution does, and is distributed afterwards.
    ``inexact``: they could, but it is too large for that.
    """

    key: Any
    name: str
    ops: tuple[Op, ...]
    words: tuple[Ref, ...]
    arrays: tuple[int, ...]
    outputs: tuple[int, ...]
    shardings: tuple[NamedSharding | None, ...]
    local: bool
    inexact: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What decides where values may be made.

    Attributes:
        mesh: Where results go that are wanted nowhere in particular; None for one device.
        exact: Let nothing depend on how arrays are split, at any cost in memory.
        on_cpu: The devices are CPUs.
        can_gather: This process can read every array.
        largest_shard: Bytes of the largest shard among the results.
    """

    mesh: MeshLike | None
    exact: bool
    on_cpu: bool
    can_gather: bool
    largest_shard: int

    @property
    def local_limit(self) -> int:
        """Bytes of the largest array that may be made whole on one device."""
        if self.exact:
            return 1 << 62
        return max(_LEAST_LOCAL, min(_MOST_LOCAL, self.largest_shard // 2))


def nbytes(aval: Any) -> int:
    """Bytes of a whole value; a key counts as its words."""
    if compat.is_key_array(aval):
        return word_count(aval) * 4
    return math.prod(aval.shape) * aval.dtype.itemsize


def _values(refs: Iterable[Ref]) -> list[int]:
    return [r for r in refs if not isinstance(r, Constant)]


def split(
    graph: Graph, readable: Iterable[int], wanted: Mapping[int, NamedSharding | None], terms: Terms
) -> tuple[Tape, list[Call]]:
    """Cut up a traced function.

    Args:
        graph: The function.
        readable: Numbers of the inputs that this process can read.
        wanted: The outputs that are made here, with the sharding of each; None leaves them on one device.
        terms: What decides where values may be made.

    Returns:
        The small values, among them perhaps outputs, and the programs in an order in which they can run.
    """
    tape = Tape(graph)
    ops = _separate_small(graph, set(readable), tape)
    groups = _Groups(graph, ops, tape, wanted, terms)
    return tape, [_call(graph, tape, [ops[i] for i in sorted(group)], groups, terms) for group in groups.ordered()]


def _separate_small(graph: Graph, readable: set[int], tape: Tape) -> list[Op]:
    """Put on the tape what is small and needed by others; returns the other operations that are needed at all."""
    avals = graph.avals
    small = {v for v in (*graph.inputs, *graph.consts) if is_small(avals[v]) and (v in readable or v in graph.consts)}
    small_ops: set[int] = set()
    for i, op in enumerate(graph.ops):
        inputs_small = all(has_words(r.aval) if isinstance(r, Constant) else r in small for r in op.inputs)
        if inputs_small and not op.effects and all(is_small(avals[v], op.primitive.name) for v in op.outputs):
            small_ops.add(i)
            small.update(op.outputs)
    needed, consumed = set(_values(graph.outputs)), set[int]()
    on_tape: list[Op] = []
    rest: list[Op] = []
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if not (op.effects or needed.intersection(op.outputs)):
            continue
        taped = i in small_ops and bool(consumed.intersection(op.outputs))
        (on_tape if taped else rest).append(op)
        needed.update(_values(op.inputs))
        consumed.update(_values(op.inputs))
    for value in graph.inputs:
        if value in small and value in consumed:
            tape.add_input(value)
    for value, content in graph.consts.items():
        if value in small and value in needed:
            tape.add_constant(value, content)
    for op in reversed(on_tape):
        tape.add_op(op)
    return rest[::-1]


class _Groups:
    """The operations of each program, as positions in the list of operations."""

    def __init__(
        self, graph: Graph, ops: Sequence[Op], tape: Tape, wanted: Mapping[int, NamedSharding | None], terms: Terms
    ):
        self._graph, self._ops, self._wanted, self._terms = graph, ops, wanted, terms
        self.places: dict[int, NamedSharding | None] = dict(wanted)
        self.users: dict[int, set[int]] = collections.defaultdict(set)
        self._makers = {v: i for i, op in enumerate(ops) for v in op.outputs}
        self.fills: set[int] = set()
        for op in ops:
            on_device = [r for r in _values(op.inputs) if r not in tape]
            if op.primitive.name in _FILLS and all(r in self.fills for r in on_device):
                self.fills.update(op.outputs)
        self._parents = list(range(len(ops)))
        self._core = [i for i, op in enumerate(ops) if not self.fills.issuperset(op.outputs)]
        for i in reversed(self._core):
            self._assign(i)
            for ref in _values(ops[i].inputs):
                self.users[ref].add(i)

    def _find(self, i: int) -> int:
        while self._parents[i] != i:
            self._parents[i] = self._parents[self._parents[i]]
            i = self._parents[i]
        return i

    def _assign(self, i: int) -> None:
        """Choose the program of an operation, all of whose users have theirs."""
        used = [v for v in self._ops[i].outputs if self.users[v]]
        programs = {self._find(u) for v in used for u in self.users[v]}
        ends_here = any(v in self.places for v in self._ops[i].outputs)
        if not ends_here and len(programs) == 1:
            self._parents[i] = programs.pop()
            return
        for value in used:
            if value in self.places:
                continue
            place = self._common_place(value)
            if place is _NOWHERE:
                for user in self.users[value]:
                    self._parents[self._find(user)] = i
            else:
                self.places[value] = place

    def _common_place(self, value: int) -> Any:
        """Where a value that several programs need is kept: as a result of theirs that has its shape."""
        aval = self._graph.avals[value]
        programs = {self._find(u) for u in self.users[value]}
        for other, sharding in self.places.items():
            maker = self._makers.get(other)
            if maker is not None and self._find(maker) in programs and self._graph.avals[other].shape == aval.shape:
                return sharding
        if self._terms.mesh is None:
            return None
        small = nbytes(aval) <= _LEAST_LOCAL
        return NamedSharding(self._terms.mesh, PartitionSpec()) if small else _NOWHERE

    def ordered(self) -> list[set[int]]:
        """The programs, each after those whose values it needs."""
        everything = set(range(len(self._ops)))
        if any(op.effects for op in self._ops):
            return [everything] if everything else []
        groups: dict[int, set[int]] = collections.defaultdict(set)
        for i in self._core:
            groups[self._find(i)].add(i)
        for i in everything.difference(self._core):
            if any(v in self.places for v in self._ops[i].outputs):
                groups[i].add(i)
        home = {v: program for program, group in groups.items() for i in group for v in self._ops[i].outputs}
        needs = {
            program: {home[r] for i in group for r in _values(self._ops[i].inputs) if r in home and r not in self.fills}
            - {program}
            for program, group in groups.items()
        }
        for group in groups.values():
            self._add_fills(group)
        done: dict[int, None] = {}
        pending = sorted(groups, key=lambda program: max(groups[program]))
        while pending:
            ready = [program for program in pending if needs[program] <= done.keys()]
            if not ready:
                # Programs that need each other: only a function of a strange shape has them. One program has all.
                return [everything]
            done.update(dict.fromkeys(ready))
            pending = [program for program in pending if program not in done]
        return [groups[program] for program in done]

    def leaves(self, value: int, ops: Sequence[Op]) -> bool:
        """True if a value made by one program's operations is wanted as an output or by another program."""
        if value not in self.places:
            return False
        if value in self.fills and len(ops) < len(self._ops):
            # Others that use a constant make it anew; the program that ends in it is the one that delivers it.
            return value in ops[-1].outputs
        mine = set(map(id, ops))
        return value in self._wanted or any(id(self._ops[user]) not in mine for user in self.users[value])

    def _add_fills(self, group: set[int]) -> None:
        unseen = list(group)
        while unseen:
            for ref in _values(self._ops[unseen.pop()].inputs):
                if ref in self.fills and self._makers[ref] not in group:
                    group.add(self._makers[ref])
                    unseen.append(self._makers[ref])


def _call(graph: Graph, tape: Tape, ops: Sequence[Op], groups: _Groups, terms: Terms) -> Call:
    words: dict[Any, Ref] = {}
    arrays: dict[int, int] = {}
    made: dict[int, int] = {}
    lines: list[Any] = []

    def read(ref: Ref) -> Any:
        if isinstance(ref, Constant):
            if not has_words(ref.aval):
                return "literal", freeze(ref.value), aval_key(ref.aval)
            words.setdefault(("constant", len(words)), ref)
            return "word", len(words) - 1, aval_key(ref.aval)
        if ref in made:
            return "made", made[ref]
        if ref in tape:
            words.setdefault(ref, ref)
            return "word", list(words).index(ref), aval_key(graph.avals[ref])
        number = arrays.setdefault(ref, len(arrays))
        return "array", number, aval_key(graph.avals[ref])

    for op in ops:
        inputs = tuple(read(r) for r in op.inputs)
        for value in op.outputs:
            made[value] = len(made)
        outs = tuple(aval_key(graph.avals[v]) for v in op.outputs)
        lines.append((freeze_op(op.primitive, op.params), inputs, outs))
    outputs = tuple(v for v in made if groups.leaves(v, ops))
    shardings = tuple(groups.places[v] for v in outputs)
    unsplittable, size = _depends_on_split(graph, ops, outputs, shardings, groups.fills, terms)
    local = unsplittable and (terms.can_gather or not arrays) and size <= terms.local_limit
    key = (tuple(lines), tuple(made[v] for v in outputs), shardings, local)
    args = tuple(words.values()), tuple(arrays), outputs, shardings
    return Call(key, _name(ops), tuple(ops), *args, local=local, inexact=unsplittable and not local)


def _name(ops: Sequence[Op]) -> str:
    jits = [str(op.params["name"]).strip("_") for op in ops if "name" in op.params]
    return f"init_{jits[0] if jits else ops[-1].primitive.name}"


def _depends_on_split(
    graph: Graph,
    ops: Sequence[Op],
    outputs: Sequence[int],
    shardings: Sequence[NamedSharding | None],
    fills: set[int],
    terms: Terms,
) -> tuple[bool, int]:
    """Whether values could differ from those of eager execution in the last bit, and the bytes of the largest."""
    found = Traits(False, False)
    size = 0
    for op in ops:
        avals = [r.aval if isinstance(r, Constant) else graph.avals[r] for r in op.inputs]
        found |= traits(op.primitive, op.params, [*avals, *(graph.avals[v] for v in op.outputs)])
        size = max([size, *(nbytes(graph.avals[v]) for v in op.outputs if v not in fills)])
    shapes = {graph.avals[v].shape for v in outputs}
    shards = [(graph.avals[v].shape, s) for v, s in zip(outputs, shardings, strict=True) if s is not None]
    split_up = [(whole, s.shard_shape(whole)) for whole, s in shards if s.shard_shape(whole) != whole]
    rows = [n for pair in split_up for shape in pair for n in shape[-1:]]
    if split_up:
        between = {graph.avals[v].shape for op in ops for v in op.outputs if v not in fills} - shapes
        rows += [shape[-1] for shape in between if math.prod(shape) > 1]
    ragged = terms.on_cpu and found.transcendental and any(n % VECTOR for n in rows)
    return found.rounds or ragged, size
