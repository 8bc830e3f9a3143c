"""The exchange between processes, carried out on devices that do not exist."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from namedshard._place import exchange as ex
from namedshard._place.boxes import Layout, layout, local_slices, shape_of, volume, whole
from namedshard._types import Bounds


@dataclasses.dataclass(frozen=True, order=True)
class Device:
    process_index: int
    id: int


def sent_bytes(plan: ex.Schedule) -> int:
    """Bytes that all processes together send: those that cross, and the padding of slots."""
    return sum(p.steps * p.slot_bytes * sum(map(len, p.rounds)) for p in plan.phases)


def devices(*per_process: int) -> list[Device]:
    """Devices of processes with these many each."""
    owners = [p for p, n in enumerate(per_process) for _ in range(n)]
    return [Device(p, i) for i, p in enumerate(owners)]


def grid(shape: tuple[int, ...], split: tuple[int, ...], on: Sequence[Device]) -> Layout:
    """An array split into equal parts over devices, the first of them first; those left over hold copies."""
    parts = [[(i * n // k, (i + 1) * n // k) for i in range(k)] for n, k in zip(shape, split, strict=True)]
    boxes = list(itertools.product(*parts))
    return layout({d: boxes[i % len(boxes)] for i, d in enumerate(on)}, len(shape))


def carry_out(
    values: Sequence[np.ndarray], changes: Sequence[tuple[Layout, Layout]], budget: int
) -> dict[tuple[int, int, Bounds], np.ndarray]:
    """What each process has in each target box in the end, by (process, array, box)."""
    processes = {d.process_index for pair in changes for layout in pair for ds in layout.holders.values() for d in ds}
    out = {
        (d.process_index, leaf, box): np.full(shape_of(box), 99, values[leaf].dtype)
        for leaf, (_, target) in enumerate(changes)
        for box, holders in target.holders.items()
        for d in holders
    }
    sized = [(source, target, v.dtype.itemsize) for v, (source, target) in zip(values, changes, strict=True)]
    plans = {p: ex.schedule(sized, p, budget) for p in sorted(processes)}
    first = next(iter(plans.values()))

    def put(leaf: int, piece: ex.Piece, box: Bounds, data: np.ndarray) -> None:
        assert all(lo <= a and b <= hi for (a, b), (lo, hi) in zip(box, piece.source_box, strict=True))
        out[piece.target.process_index, leaf, piece.target_box][local_slices(box, piece.target_box)] = data

    for p, plan in plans.items():
        assert (plan.devices, plan.phases, plan.crossing_bytes) == (first.devices, first.phases, first.crossing_bytes)
        for leaf, piece in plan.local:
            assert piece.source.process_index == piece.target.process_index == p
            put(leaf, piece, piece.box, values[leaf][local_slices(piece.box, whole(values[leaf].shape))])
    for phase in first.phases:
        for pairs in phase.rounds:
            assert len({s for s, _ in pairs}) == len({r for _, r in pairs}) == len(pairs)
        for step in range(phase.steps):
            start = phase.start + step * phase.slot_bytes
            for sender, receiver in itertools.chain(*phase.rounds):
                sent, expected = (
                    list(
                        plans[first.devices[i].process_index]
                        .streams[sender, receiver]
                        .between(start, start + phase.slot_bytes)
                    )
                    for i in (sender, receiver)
                )
                assert sent == expected
                used = 0
                for f in sent:
                    assert f.offset >= used and f.offset % values[f.leaf].dtype.itemsize == 0
                    used = f.offset + volume(f.box) * values[f.leaf].dtype.itemsize
                    assert used <= phase.slot_bytes
                    put(f.leaf, f.piece, f.box, values[f.leaf][local_slices(f.box, whole(values[f.leaf].shape))])
    return out


def assert_exact(
    values: Sequence[np.ndarray],
    changes: Sequence[tuple[Layout, Layout]],
    budget: int,
) -> None:
    for (_, leaf, box), got in carry_out(values, changes, budget).items():
        np.testing.assert_array_equal(got, values[leaf][local_slices(box, whole(values[leaf].shape))])


def counting(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


@given(data=st.data())
def test_every_target_box_arrives_whole(data: st.DataObject) -> None:
    everyone = devices(*data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    values: list[np.ndarray] = []
    changes: list[tuple[Layout, Layout]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
        values.append(counting(shape, data.draw(st.sampled_from([np.uint8, np.float32, np.complex128]))))
        change = []
        for _ in range(2):
            on = data.draw(st.permutations(everyone))[: data.draw(st.integers(1, len(everyone)))]
            split = tuple(data.draw(st.integers(1, min(max(n, 1), 3))) for n in shape)
            if math.prod(split) > len(on):
                split = (1,) * len(shape)
            change.append(grid(shape, split, on))
        changes.append((change[0], change[1]))
    assert_exact(values, changes, data.draw(st.sampled_from([1, 1 << 10, 1 << 30])))


def test_large_arrays_take_steps_that_fit_the_budget() -> None:
    all8 = devices(4, 4)
    shape = (64, 33, 17)
    values = [counting(shape, np.float64), counting(shape, np.uint8), counting((100_000,), np.float32)]
    changes = [
        (grid(shape, (8, 1, 1), all8), grid(shape, (1, 1, 1), all8[:1])),
        (grid(shape, (2, 1, 4), all8), grid(shape, (8, 1, 1), all8[::-1])),
        (grid((100_000,), (8,), all8), grid((100_000,), (1,), all8[7:])),
    ]
    budget = 8 * 4 * 8 * ex.SMALLEST_SLOT
    assert_exact(values, changes, budget)
    sized = [(s, t, v.dtype.itemsize) for v, (s, t) in zip(values, changes, strict=True)]
    plan = ex.schedule(sized, 0, budget)
    assert len(plan.phases) > 1
    for phase in plan.phases:
        assert phase.slot_bytes * len(phase.rounds) * 2 * 4 <= budget / 4
        assert phase.slot_bytes % ex.ALIGNMENT == 0
    assert plan.crossing_bytes <= sent_bytes(plan) < 1.5 * plan.crossing_bytes


def test_a_box_is_sent_once_to_a_process_and_its_holders_take_turns() -> None:
    all8 = devices(4, 4)
    source = grid((4,), (1,), all8[:4])
    target = grid((4,), (1,), all8[4:])
    senders = [[p.source.id for p in ex.pieces_between(source, target, turn)] for turn in range(5)]
    assert senders == [[0], [1], [2], [3], [0]]
    assert [p.target.id for p in ex.pieces_between(source, target)] == [4]
    # A process that has a box takes it from itself.
    assert [p.crosses for p in ex.pieces_between(grid((4,), (1,), all8), target)] == [False]


def test_nothing_moves_that_need_not() -> None:
    all8 = devices(4, 4)
    rows, shifted = grid((8, 8), (8, 1), all8), grid((8, 8), (8, 1), [*all8[4:], *all8[:4]])
    assert ex.schedule([(rows, rows, 4)], 0, 1 << 20).crossing_bytes == 0
    assert ex.schedule([(rows, shifted, 4)], 0, 1 << 20).crossing_bytes == 8 * 8 * 4
    columns = grid((8, 8), (1, 8), all8)
    assert sum(volume(p.box) for p in ex.pieces_between(rows, columns) if p.crosses) == 8 * 8 // 2


def test_flat_ranges_are_boxes_in_order() -> None:
    box = ((3, 5), (0, 3), (2, 6))
    array = np.arange(10 * 10 * 10).reshape(10, 10, 10)
    flat = array[local_slices(box, whole(array.shape))].ravel()
    for first, last in itertools.combinations_with_replacement(range(len(flat) + 1), 2):
        got = [
            (begin, array[local_slices(b, whole(array.shape))].ravel()) for begin, b in ex.flat_range(box, first, last)
        ]
        assert [begin for begin, _ in got] == list(itertools.accumulate([len(x) for _, x in got], initial=first))[:-1]
        assert np.concatenate([np.zeros(0, int), *[x for _, x in got]]).tolist() == flat[first:last].tolist()
        assert len(got) <= 5
    assert list(ex.flat_range((), 0, 1)) == [(0, ())]


def test_streams_that_end_early_do_not_pad_the_rest() -> None:
    all8 = devices(1, 1, 1, 1)
    n = 1 << 20
    long = (grid((n,), (1,), all8[:1]), grid((n,), (1,), all8[1:2]))
    short = [(grid((16,), (1,), [a]), grid((16,), (1,), [b])) for a, b in itertools.permutations(all8[1:], 2)]
    plan = ex.schedule([(s, t, 4) for s, t in [long, *short]], 0, 1 << 30)
    assert [len([*itertools.chain(*phase.rounds)]) for phase in plan.phases] == [7, 1]
    assert sent_bytes(plan) < 1.2 * plan.crossing_bytes


def test_a_large_model_on_many_devices_is_planned_by_its_kinds_of_moves() -> None:
    many = devices(*[8] * 32)
    turned = [many[i] for i in np.arange(256).reshape(32, 8).T.ravel()]
    kinds = [
        (grid((256, 1024), (256, 1), many), grid((256, 1024), (256, 1), turned)),
        (grid((256, 1024), (16, 16), many), grid((256, 1024), (16, 16), turned)),
        (grid((1024,), (1,), many), grid((1024,), (8,), turned)),
    ]
    ex._between.cache_clear()
    plan = ex.schedule([(*kinds[i % 3], 4) for i in range(1200)], 5, 1 << 29)
    assert ex._between.cache_info().misses == 2 + ex.TURNS
    owners = collections.Counter(p.target.process_index == 5 for _, p in plan.local)
    assert owners[False] == 0 and owners[True] > 0
