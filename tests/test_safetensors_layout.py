"""Laws of layouts and ranges: against numpy for every chain of copies, and byte for byte for every set of pieces."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from namedshard._place.boxes import local_slices, overlap, shape_of, volume
from namedshard._safetensors.layout import (
    NotACopy,
    Part,
    View,
    boxes_in,
    concatenate,
    covered,
    flat_offset,
    identity,
    layer_of,
    leaf_bounds,
    leaf_view,
)
from namedshard._safetensors.ranges import LOCAL, REMOTE, WASTE, ReadSettings, coalesce, plan_chunks, run_offsets

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def tensor_from_leaf(part: Part, leaf: np.ndarray, size: int) -> np.ndarray:
    """The flat tensor that a part makes of a leaf; -1 where it has nothing."""
    flat = np.full(size, -1)
    view = leaf_view(part, part.whole, leaf, [0] * leaf.ndim)
    for index in np.ndindex(*view.shape):
        box = tuple((i, i + 1) for i in index)
        flat[flat_offset(part, box)] = view[index]
    return flat


def factoring(size: int, picks: list[int]) -> tuple[int, ...]:
    """A shape of that many elements."""
    out: list[int] = []
    for pick in picks[:4]:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        out.append(divisors[pick % len(divisors)])
        size //= out[-1]
    return (*out, size)


CHAINS = st.tuples(
    SHAPES,
    st.lists(
        st.tuples(
            st.sampled_from(["reshape", "transpose", "slice"]), st.lists(st.integers(0, 99), min_size=8, max_size=8)
        ),
        max_size=5,
    ),
)
"""A leaf's shape, and copying operations with numbers to choose their arguments by."""


def applied(chain) -> tuple[tuple[int, ...], View, np.ndarray]:
    """The operations that can be followed, applied to a view and to numpy's array."""
    shape, operations = chain
    value = np.arange(math.prod(shape)).reshape(shape)
    view = View(shape, ((0, identity(shape)),))
    for kind, picks in operations:
        try:
            if kind == "reshape":
                to = factoring(value.size, picks)
                view, value = view.reshape(to), value.reshape(to)
            elif kind == "transpose":
                order = sorted(range(value.ndim), key=lambda i: (picks[i], i))
                view, value = view.transpose(order), value.transpose(order)
            else:
                starts = [p % n for p, n in zip(picks, value.shape, strict=False)]
                stops = [a + 1 + p % (n - a) for a, n, p in zip(starts, value.shape, picks[4:] + picks, strict=False)]
                view = view.slice(starts, stops)
                value = value[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))]
        except NotACopy:
            continue
    return shape, view, value


@given(CHAINS)
def test_a_view_is_what_numpy_makes_of_the_leaf(chain):
    shape, view, value = applied(chain)
    leaf = np.arange(math.prod(shape)).reshape(shape)
    assert view.shape == value.shape
    total = np.full(value.size, -1)
    for _, part in view.parts:
        flat = tensor_from_leaf(part, leaf, value.size)
        assert not ((flat >= 0) & (total >= 0)).any()
        total = np.maximum(total, flat)
    np.testing.assert_array_equal(total.reshape(value.shape), value)


@given(CHAINS, st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=4, max_size=4))
def test_boxes_within_bounds_are_disjoint_and_have_all_that_is_there(chain, picks):
    shape, view, _ = applied(chain)
    bounds = tuple(
        (min(a % (n + 1), b % (n + 1)), max(a % (n + 1), b % (n + 1))) for n, (a, b) in zip(shape, picks, strict=False)
    )
    inside = np.zeros(shape, bool)
    inside[tuple(slice(a, b) for a, b in bounds)] = True
    for _, part in view.parts:
        seen = np.zeros(shape, int)
        for box in boxes_in(part, bounds):
            region = leaf_view(part, box, seen, [0] * len(shape))
            region += 1
            assert overlap(leaf_bounds(part, box), bounds) == leaf_bounds(part, box)
        has = np.zeros(shape, int)
        everything = leaf_view(part, part.whole, has, [0] * len(shape))
        everything += 1
        np.testing.assert_array_equal(seen, has * inside)


def test_reshapes_across_the_edge_of_a_slice_are_followed_or_refused():
    view = View((4, 6), ((0, identity((4, 6))),)).slice([0, 0], [4, 4]).reshape((2, 8))
    value = np.arange(24).reshape(4, 6)[:, :4].reshape(2, 8)
    ((_, part),) = view.parts
    np.testing.assert_array_equal(tensor_from_leaf(part, np.arange(24).reshape(4, 6), 16).reshape(2, 8), value)
    sliced = View((6,), ((0, identity((6,))),)).slice([1], [5]).reshape((2, 2)).transpose((1, 0))
    ((_, part),) = sliced.parts
    np.testing.assert_array_equal(tensor_from_leaf(part, np.arange(6), 4), [1, 3, 2, 4])
    with pytest.raises(NotACopy):
        View((5,), ((0, identity((5,))),)).shifted((6,), (0,)).reshape((3, 2)).transpose((1, 0))


def test_concatenation_and_layers():
    a, b = View((2, 3), ((0, identity((2, 3))),)), View((2, 1), ((1, identity((2, 1))),))
    joined_view = concatenate([a, b], 1)
    assert joined_view.shape == (2, 4)
    leaves = [np.arange(6).reshape(2, 3), np.arange(10, 12).reshape(2, 1)]
    flat = np.maximum(*(tensor_from_leaf(part, leaves[leaf], 8) for leaf, part in joined_view.parts))
    np.testing.assert_array_equal(flat.reshape(2, 4), np.concatenate(leaves, 1))
    with pytest.raises(NotACopy, match="different scales"):
        concatenate([a, b.scaled(2.0)], 1)
    with pytest.raises(NotACopy, match="multiplied by 0"):
        a.scaled(0.0)
    stacked = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(
        tensor_from_leaf(layer_of(identity((2, 4)), 1, 2), stacked, 8).reshape(2, 4), stacked[:, 2]
    )


def test_a_leaf_is_covered_by_disjoint_parts_or_by_one_that_is_whole():
    halves = [layer_of(identity((3,)), 0, i) for i in range(2)]
    assert covered(halves, (2, 3))
    assert not covered(halves[:1], (2, 3))
    assert not covered([halves[0], halves[0]], (2, 3))
    assert covered([identity((2, 3)), identity((2, 3))], (2, 3))
    assert covered([], (0, 3))
    quarters = [layer_of(layer_of(identity(()), 0, j), 0, i) for i, j in itertools.product(range(2), range(2))]
    assert covered(quarters, (2, 2))
    assert not covered([*quarters[:3], quarters[0]], (2, 2))


@st.composite
def wanted(draw):
    """A leaf's shape, the order of its dimensions in the file, and the shards of a grid that a process wants of it."""
    shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple))
    order = draw(st.permutations(range(len(shape))))
    cuts = [draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape]
    grid = [[(i * (n // c), (i + 1) * (n // c)) for i in range(c)] for n, c in zip(shape, cuts, strict=True)]
    return shape, order, draw(st.lists(st.sampled_from(list(itertools.product(*grid))), min_size=1, unique=True))


TIGHT = ReadSettings(threads=1, read_bytes=64, coalesce_below=32, max_runs=10_000, row_bytes=1)
ROWS = ReadSettings(threads=1, read_bytes=64, coalesce_below=32, max_runs=0, row_bytes=10_000)


@given(wanted(), st.sampled_from([1, 2, 4]), st.sampled_from([TIGHT, ROWS, LOCAL, REMOTE]))
def test_every_wanted_element_is_read_once_and_hardly_any_other(pieces, itemsize, settings):
    shape, order, bounds = pieces
    ((_, part),) = View(shape, ((0, identity(shape)),)).transpose(order).parts
    boxes = [box for b in bounds for box in boxes_in(part, b)]
    begin = 1000
    reads = np.zeros(math.prod(shape) * itemsize, int)
    delivered = [np.zeros(shape_of(box), int) for box in boxes]
    for chunk in plan_chunks(part, boxes, itemsize, begin, settings):
        assert chunk.nbytes <= max(settings.read_bytes, itemsize)
        for offset in run_offsets(part, chunk, itemsize):
            reads[offset - begin : offset - begin + chunk.run_bytes] += 1
        for i in chunk.requests:
            shared = overlap(boxes[i], chunk.box)
            if shared is not None:
                delivered[i][local_slices(shared, boxes[i])] += 1
    for box in delivered:
        assert (box == 1).all()
    needed = sum(volume(box) for box in bounds) * itemsize
    assert reads.max() == 1
    if settings is not ROWS:
        assert reads.sum() <= needed * (1 + 2 * WASTE)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=12))
def test_spans_are_joined_in_order_with_little_waste(gaps):
    spans, at = [], 0
    for gap, length in gaps:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    groups = list(coalesce(spans, TIGHT))
    assert [i for group in groups for i in group] == list(range(len(spans)))
    for group in groups:
        useful = sum(spans[i][1] - spans[i][0] for i in group)
        whole = spans[group[-1]][1] - spans[group[0]][0]
        assert whole <= useful * (1 + WASTE)
        assert len(group) == 1 or whole <= TIGHT.read_bytes
    assert list(coalesce([(0, 8), (8, 16), (16, 24)], TIGHT)) == [[0, 1, 2]]
    assert list(coalesce([(0, 8), (9, 17)], TIGHT)) == [[0], [1]]
    assert list(coalesce([], TIGHT)) == []


def test_a_large_run_is_not_cut_where_pieces_only_share_it():
    part = identity((64, 64))
    columns = [((0, 64), (i * 8, (i + 1) * 8)) for i in range(8)]
    (chunk,) = plan_chunks(part, columns, 4, 0, LOCAL)
    assert (chunk.requests, chunk.outer, chunk.start, chunk.nbytes) == (tuple(range(8)), 0, 0, 64 * 64 * 4)
    (chunk,) = plan_chunks(part, columns[:4], 4, 0, LOCAL)
    assert (chunk.outer, chunk.run_bytes, chunk.nbytes) == (1, 128, 64 * 128)


def test_very_many_short_runs_are_read_as_whole_rows():
    part = identity((100_000, 16))
    outer_columns = [((0, 100_000), (0, 4)), ((0, 100_000), (12, 16))]
    found = list(plan_chunks(part, outer_columns, 4, 0, LOCAL))
    assert all(chunk.outer == 0 and chunk.requests == (0, 1) for chunk in found)
    assert max(chunk.nbytes for chunk in found) <= LOCAL.read_bytes
    assert sum(chunk.nbytes for chunk in found) == 100_000 * 64
    few = list(plan_chunks(identity((1000, 16)), [((0, 1000), (0, 4)), ((0, 1000), (12, 16))], 4, 0, LOCAL))
    assert sum(chunk.nbytes for chunk in few) == 1000 * 32
    wide = list(plan_chunks(identity((20_000, 2048)), [((0, 20_000), (0, 1024))], 4, 0, LOCAL))
    assert sum(chunk.nbytes for chunk in wide) == 20_000 * 4096
