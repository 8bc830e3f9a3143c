"""PURE. Which operations of a traced initialiser go together into one program, and where its results are wanted.

A program ends in what is wanted: an output of the function, or a large value that several programs need. What leads up
to it belongs to it as long as nothing else needs it; small values come from the `Tape`, constants are made anew in each
program that uses them.
"""

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._init.jaxpr import Constant, Graph, Op, Ref, aval_key, freeze_op, literal_key
from namedshard._init.tape import Tape, has_words, is_small, word_count
from namedshard._init.traits import MOVEMENT, Traits, is_float, single_rounding, traits
from namedshard._plan.mesh import MeshLike

_FILLS = frozenset(
    {"broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type"}
)

VECTOR = 16
"""On CPUs, rows whose length is a multiple of this are worked on by vector instructions from end to end."""

_LEAST_LOCAL, _MOST_LOCAL = 256 << 10, 64 << 20
_LEAST_PACK, _MOST_PACKS, _MOST_FILLS = 64 << 10, 8, 256
_NOWHERE = object()

MOST_AT_ONCE = 4
"""How many equal programs run as one; the more, the less it helps."""


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One program to run: which words and arrays go in, which values come out, and where.

    ``key`` tells what is compiled, without the values' numbers. ``local``: the values could depend on how arrays are
    split or on what is compiled together, so it runs operation by operation on one device, as eager execution does, and
    is distributed afterwards.
    ``inexact``: they could, but it is too large for that. ``fill``: it only repeats constants.
    """

    key: Any
    name: str
    ops: tuple[Op, ...]
    words: tuple[Ref, ...]
    arrays: tuple[int, ...]
    outputs: tuple[int, ...]
    shardings: tuple[NamedSharding | None, ...]
    fill: bool
    local: bool
    inexact: bool

    def shard_bytes(self, graph: Graph) -> int:
        """Bytes of its results on each device."""
        return sum(shard_bytes(graph.avals[v], s) for v, s in zip(self.outputs, self.shardings, strict=True))


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


def shard_bytes(aval: Any, sharding: NamedSharding | None) -> int:
    """Bytes of a value on each device."""
    if sharding is None or not math.prod(aval.shape):
        return nbytes(aval)
    return nbytes(aval) * math.prod(sharding.shard_shape(aval.shape)) // math.prod(aval.shape)


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
    ops, apart = _separate_small(graph, set(readable), tape)
    groups = _Groups(graph, ops, tape, wanted, apart, terms)

    known: dict[Any, tuple[bool, bool, int]] = {}

    def cut(some: Sequence[Op], results: Mapping[int, NamedSharding | None]) -> Call:
        return _call(graph, tape, some, results, groups.fills, terms, known)

    calls: list[Call] = []
    for group in groups.ordered():
        some = [ops[i] for i in sorted(group)]
        calls.append(cut(some, groups.results(some)))
    return tape, _pack(calls, cut, graph, terms)


def _separate_small(graph: Graph, readable: set[int], tape: Tape) -> tuple[list[Op], set[int]]:
    """Put on the tape what is small and needed by others.

    Returns:
        The other operations that are needed at all; and those of their values that are small and needed by others, but
        come out otherwise on a tape than by eager execution.
    """
    avals = graph.avals
    small = {v for v in (*graph.inputs, *graph.consts) if is_small(avals[v]) and (v in readable or v in graph.consts)}
    small_ops, apart = set[int](), set[int]()
    for i, op in enumerate(graph.ops):
        inputs_small = all(has_words(r.aval) if isinstance(r, Constant) else r in small for r in op.inputs)
        if inputs_small and not op.effects and all(is_small(avals[v], op.primitive.name) for v in op.outputs):
            if single_rounding(op.primitive, op.params, _avals(graph, op)):
                small_ops.add(i)
                small.update(op.outputs)
            else:
                apart.update(op.outputs)
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
    return rest[::-1], apart & consumed


class _Groups:
    """The operations of each program, as positions in the list of operations."""

    def __init__(
        self,
        graph: Graph,
        ops: Sequence[Op],
        tape: Tape,
        wanted: Mapping[int, NamedSharding | None],
        apart: Iterable[int],
        terms: Terms,
    ):
        self._graph, self._ops, self._wanted, self._terms = graph, ops, wanted, terms
        everywhere = None if terms.mesh is None else NamedSharding(terms.mesh, PartitionSpec())
        self.places: dict[int, NamedSharding | None] = dict.fromkeys(apart, everywhere) | dict(wanted)
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

    def results(self, ops: Sequence[Op]) -> dict[int, NamedSharding | None]:
        """The values made by one program's operations that are outputs or that another program needs."""
        mine = set(map(id, ops))

        def leaves(value: int) -> bool:
            if value in self.fills and len(ops) < len(self._ops):
                # Others that use a constant make it anew; the program that ends in it is the one that delivers it.
                return value in self.places and value in ops[-1].outputs
            return value in self._wanted or any(id(self._ops[user]) not in mine for user in self.users[value])

        return {v: self.places.get(v) for op in ops for v in op.outputs if leaves(v)}

    def _add_fills(self, group: set[int]) -> None:
        unseen = list(group)
        while unseen:
            for ref in _values(self._ops[unseen.pop()].inputs):
                if ref in self.fills and self._makers[ref] not in group:
                    group.add(self._makers[ref])
                    unseen.append(self._makers[ref])


def _call(
    graph: Graph,
    tape: Tape,
    ops: Sequence[Op],
    wanted: Mapping[int, NamedSharding | None],
    fills: set[int],
    terms: Terms,
    known: dict[Any, tuple[bool, bool, int]],
) -> Call:
    words: list[Ref] = []
    numbers: dict[Any, int] = {}
    arrays: dict[int, int] = {}
    made: dict[int, int] = {}
    lines: list[Any] = []

    def word(key: Any, ref: Ref, aval: Any) -> Any:
        if key not in numbers:
            numbers[key] = len(words)
            words.append(ref)
        return "word", numbers[key], aval_key(aval)

    def read(ref: Ref) -> Any:
        if isinstance(ref, Constant):
            if not has_words(ref.aval):
                return literal_key(ref.value, ref.aval)
            return word(("constant", id(ref)), ref, ref.aval)
        if ref in made:
            return "made", made[ref]
        if ref in tape:
            return word(ref, ref, graph.avals[ref])
        number = arrays.setdefault(ref, len(arrays))
        return "array", number, aval_key(graph.avals[ref])

    for op in ops:
        inputs = tuple(read(r) for r in op.inputs)
        for value in op.outputs:
            made[value] = len(made)
        outs = tuple(aval_key(graph.avals[v]) for v in op.outputs)
        lines.append((freeze_op(op), inputs, outs))
    outputs, shardings = tuple(wanted), tuple(wanted.values())
    key = tuple(lines), tuple(made[v] for v in outputs), shardings
    if key not in known:
        known[key] = _depends_on_split(graph, ops, wanted, arrays, fills, terms)
    unsplittable, manual, size = known[key]
    local = unsplittable and (terms.can_gather or not arrays) and (manual or size <= terms.local_limit)
    fill = fills.issuperset(made)
    return Call(
        key,
        "init_constants" if fill else _name(ops),
        tuple(ops),
        tuple(words),
        tuple(arrays),
        outputs,
        shardings,
        fill=fill,
        local=local,
        inexact=(unsplittable and not local) or _apart_from_its_jit(graph, ops),
    )


def batches(calls: Sequence[Call], graph: Graph, apart: Container[int]) -> list[tuple[Call, ...]]:
    """Equal programs, several to run at once where that is as cheap in memory: starting a program takes time.

    Args:
        calls: The programs in order.
        graph: What they are cut from.
        apart: Values whose programs are to run by themselves.
    """
    equal: dict[Any, list[Call]] = collections.defaultdict(list)
    for call in calls:
        avals = [graph.avals[v] for v in call.outputs]
        plain = not any(compat.is_key_array(a) or getattr(a, "weak_type", False) for a in avals)
        effects = any(op.effects for op in call.ops)
        alone = call.local or call.arrays or call.fill or effects or not plain or any(v in apart for v in call.outputs)
        equal[id(call) if alone else call.key].append(call)
    out: dict[int, tuple[Call, ...]] = {}
    for same in equal.values():
        at_once = next(n for n in range(MOST_AT_ONCE, 0, -1) if len(same) % n == 0)
        for i in range(0, len(same), at_once):
            out[id(same[i])] = tuple(same[i : i + at_once])
    return [out[id(call)] for call in calls if id(call) in out]


Cut: TypeAlias = Callable[[Sequence[Op], Mapping[int, NamedSharding | None]], Call]


def _joined(calls: Sequence[Call], cut: Cut) -> Call:
    wanted = {v: s for c in calls for v, s in zip(c.outputs, c.shardings, strict=True)}
    ops = [op for c in calls for op in c.ops]
    if all(c.fill for c in calls):
        # One word for each number: the compiler then makes equal constants once and copies them.
        known: dict[Any, Ref] = {}
        for i, op in enumerate(ops):
            keys = [literal_key(r.value, r.aval) if isinstance(r, Constant) else r for r in op.inputs]
            shared = tuple(known.setdefault(key, ref) for key, ref in zip(keys, op.inputs, strict=True))
            ops[i] = dataclasses.replace(op, inputs=shared)
    return dataclasses.replace(cut(ops, wanted), local=False, inexact=False)


def _pack(calls: Sequence[Call], cut: Cut, graph: Graph, terms: Terms) -> list[Call]:
    """Put together constants, and programs that run once only as far as memory allows: each has a cost of its own."""
    fills = [c for c in calls if c.fill]
    counts = collections.Counter(c.key for c in calls)
    made = {v for c in calls for v in c.outputs}
    apart = [c for c in calls if not (c.local or c.inexact or c.fill or made.intersection(c.arrays))]
    single = sorted((c for c in apart if counts[c.key] == 1), key=lambda c: -c.shard_bytes(graph))
    limit = max(_LEAST_PACK, 2 * terms.largest_shard)
    share = math.ceil(len(single) / max(2, min(_MOST_PACKS, os.cpu_count() or 1)))
    packs = [fills[i : i + _MOST_FILLS] for i in range(0, len(fills), _MOST_FILLS)]
    room = 0
    for call in single:
        size = call.shard_bytes(graph)
        if size > room or len(packs[-1]) >= share:
            packs.append([])
            room = limit
        packs[-1].append(call)
        room -= size
    packed: dict[int, Call] = {}
    for pack in packs:
        if len(pack) > 1:
            packed.update(dict.fromkeys(map(id, pack), _joined(pack, cut)))
    return list(dict.fromkeys(packed.get(id(call), call) for call in calls))


def _name(ops: Sequence[Op]) -> str:
    jits = [str(op.params["name"]).strip("_") for op in ops if "name" in op.params]
    return f"init_{jits[0] if jits else ops[-1].primitive.name}"


def _avals(graph: Graph, op: Op) -> list[Any]:
    inputs = (r.aval if isinstance(r, Constant) else graph.avals[r] for r in op.inputs)
    return [*inputs, *(graph.avals[v] for v in op.outputs)]


def _approximates(ref: Ref, op: Op, graph: Graph, exempt: Container[int]) -> bool:
    """Whether an operation is a function of a floating input; single numbers only matter to single numbers."""
    aval = ref.aval if isinstance(ref, Constant) else graph.avals[ref]
    if not is_float(aval) or (not isinstance(ref, Constant) and ref in exempt):
        return False
    return math.prod(aval.shape) > 1 or all(math.prod(graph.avals[v].shape) <= 1 for v in op.outputs)


def _depends_on_split(
    graph: Graph,
    ops: Sequence[Op],
    wanted: Mapping[int, NamedSharding | None],
    arrays: Container[int],
    fills: set[int],
    terms: Terms,
) -> tuple[bool, bool, int]:
    """Whether values could differ from eager ones in the last bit, whether operations split them, their most bytes."""
    found = Traits(False, False)
    size = 0
    chained = False
    for op in ops:
        of_op = traits(op.primitive, op.params, _avals(graph, op))
        # Approximations come out otherwise in a loop together with other operations; not so draws from keys.
        exempt = arrays if len(ops) == 1 else ()
        chained |= of_op.transcendental and any(_approximates(r, op, graph, exempt) for r in op.inputs)
        chained |= of_op.contracts and any(isinstance(r, Constant) or r not in exempt for r in op.inputs)
        found |= of_op
        size = max([size, *(nbytes(graph.avals[v]) for v in op.outputs if v not in fills)])
    shapes = {graph.avals[v].shape for v in wanted}
    shards = [(graph.avals[v].shape, s) for v, s in wanted.items() if s is not None]
    split_up = [(whole, s.shard_shape(whole)) for whole, s in shards if s.shard_shape(whole) != whole]
    rows = [n for pair in split_up for shape in pair for n in shape[-1:]]
    if split_up:
        between = {graph.avals[v].shape for op in ops for v in op.outputs if v not in fills} - shapes
        rows += [shape[-1] for shape in between if math.prod(shape) > 1]
    ragged = terms.on_cpu and found.transcendental and any(n % VECTOR for n in rows)
    return found.rounds or chained or ragged or found.manual, found.manual, size


def _apart_from_its_jit(graph: Graph, ops: Sequence[Op]) -> bool:
    """Whether several operations here are ones that eager execution would run as parts of one jit."""
    computing = [op for op in ops if op.primitive.name not in MOVEMENT and any(map(is_float, _avals(graph, op)))]
    return len(computing) > 1 and any(op.opened for op in computing)
