"""EFFECTS. Carries out reads: several threads, each from the file straight into the shards where the bytes allow it."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import jax
import ml_dtypes
import numpy as np

from namedshard._safetensors.layout import Bounds, Part, leaf_view, overlap, volume
from namedshard._safetensors.ranges import Chunk, Habits, run_offsets
from namedshard._safetensors.source import Source


@dataclasses.dataclass(eq=False, slots=True)
class Shard:
    """A shard to fill: where it lies in its leaf, and its memory. ``unfit``: values its dtype cannot hold."""

    bounds: Bounds
    array: np.ndarray
    check: bool
    unfit: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict[str, tuple[Any, Any]])
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One chunk of one tensor, and the shards that its pieces belong to."""

    chunk: Chunk
    part: Part
    name: str
    dtype: np.dtype[Any]
    scale: float
    pieces: tuple[tuple[Bounds, Shard], ...]

    def plain(self, shard: Shard) -> bool:
        """True if the file's bytes are the shard's."""
        return self.scale == 1 and self.dtype == shard.array.dtype and self.dtype != np.bool_


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One stretch of a file, and the jobs whose chunks lie in it."""

    source: Source
    start: int
    stop: int
    jobs: Sequence[Job]

    @property
    def useful(self) -> int:
        """The bytes of the file that shards are made of: gaps that are read along do not count."""
        shared = ((job, overlap(box, job.chunk.box)) for job in self.jobs for box, _ in job.pieces)
        return sum(volume(both) * job.dtype.itemsize for job, both in shared if both is not None)


def _within(box: Bounds, outer: Bounds) -> tuple[Any, ...]:
    return (*(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, outer, strict=True)), ...)


def _view(part: Part, box: Bounds, shard: Shard) -> np.ndarray:
    return leaf_view(part, box, shard.array, [lo for lo, _ in shard.bounds])


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def scaled(array: np.ndarray, factor: float, dtype: np.dtype[Any]) -> np.ndarray:
    """An array times a number, rounded once."""
    wide = np.complex128 if dtype.kind == "c" else np.float64
    return (array.astype(wide) * factor).astype(dtype)


def _convert(job: Job, source: np.ndarray, into: np.ndarray, shard: Shard) -> None:
    if job.dtype == np.bool_:
        source = np.asarray(source.view(np.uint8) != 0)
    if job.scale != 1:
        source = scaled(source, 1 / job.scale, job.dtype)
    if shard.check:
        _check(job, source, shard)
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(into, source, casting="unsafe")


def _check(job: Job, source: np.ndarray, shard: Shard) -> None:
    """Note the lowest and the highest value that the shard's dtype cannot hold."""
    kind = shard.array.dtype
    whole = jax.numpy.issubdtype(kind, np.integer)
    if not whole:
        source = source[np.isfinite(source)]
    if not source.size:
        return
    least, most = source.min(), source.max()
    if whole:
        info = ml_dtypes.iinfo(kind)
        # Not "outside of": a value that is no number compares with none.
        # Compared as Python's numbers: a float32 would round the bound of an int32 up to a value that does not fit.
        exact: Any = int if np.issubdtype(source.dtype, np.integer) else float
        too_low, too_high = not exact(least) >= info.min, not exact(most) <= info.max
    else:
        with np.errstate(over="ignore"):
            too_low, too_high = not np.isfinite(least.astype(kind)), not np.isfinite(most.astype(kind))
    with shard.lock:
        low, high = shard.unfit.get(job.name, (None, None))
        low = least if too_low and (low is None or least < low) else low
        high = most if too_high and (high is None or most > high) else high
        if low is not None or high is not None:
            shard.unfit[job.name] = (low, high)


def _direct(job: Job) -> np.ndarray | None:
    """The shard's own memory for a chunk, run by run, if its bytes can be read there; its runs are the first axis."""
    chunk = job.chunk
    if len(job.pieces) != 1:
        return None
    box, shard = job.pieces[0]
    if overlap(box, chunk.box) != chunk.box or not job.plain(shard):
        return None
    view = _view(job.part, chunk.box, shard)
    expected = view.itemsize
    for size, stride in zip(reversed(view.shape[chunk.outer :]), reversed(view.strides[chunk.outer :]), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return view


class Scratch(threading.local):
    """One buffer per thread, used again for each read."""

    buffer: np.ndarray | None = None

    def get(self, nbytes: int) -> np.ndarray:
        """The first ``nbytes`` of it."""
        if self.buffer is None or self.buffer.nbytes < nbytes:
            self.buffer = np.empty(nbytes, np.uint8)
        return self.buffer[:nbytes]


def _deliver(job: Job, source: np.ndarray) -> None:
    for box, shard in job.pieces:
        shared = overlap(box, job.chunk.box)
        if shared is not None:
            _convert(job, source[_within(shared, job.chunk.box)], _view(job.part, shared, shard), shard)


def _boxed(job: Job, raw: np.ndarray) -> np.ndarray:
    """A chunk's bytes as its box."""
    return raw.view(job.dtype).reshape([hi - lo for lo, hi in job.chunk.box])


def _run(read: Read, scratch: Scratch) -> None:
    """Read and deliver."""
    if len(read.jobs) > 1:
        raw = scratch.get(read.stop - read.start)
        read.source.read(read.start, memoryview(raw))
        for job in read.jobs:
            at = job.chunk.start - read.start
            _deliver(job, _boxed(job, raw[at : at + job.chunk.nbytes]))
        return
    job = read.jobs[0]
    chunk = job.chunk
    offsets = run_offsets(job.part, chunk, job.dtype.itemsize)
    view = _direct(job)
    if view is not None and not view.flags.c_contiguous:
        for index, offset in zip(np.ndindex(*view.shape[: chunk.outer]), offsets, strict=True):
            read.source.read(offset, _bytes_of(view[index]))
        return
    raw = scratch.get(chunk.nbytes) if view is None else np.asarray(_bytes_of(view))
    lines = memoryview(raw)
    for i, offset in enumerate(offsets):
        read.source.read(offset, lines[i * chunk.run_bytes : (i + 1) * chunk.run_bytes])
    if view is None:
        _deliver(job, _boxed(job, raw))


def run(reads: Sequence[Read], threads: int, done: Callable[[int], None]) -> None:
    """Carry out all reads; ``done`` is told the useful bytes of each. The first error ends it."""
    scratch = Scratch()

    def one(read: Read) -> None:
        _run(read, scratch)
        done(read.useful)

    with ThreadPoolExecutor(threads, thread_name_prefix="namedshard-read") as pool:
        futures = [pool.submit(one, read) for read in reads]
        finished, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
    for future in finished:
        future.result()


def within(habits: Habits, budget: int) -> Habits:
    """The same habits with reads so small that the buffers of all threads stay within a budget."""
    fitting = max(64 << 10, budget // (2 * habits.threads))
    return dataclasses.replace(habits, read_bytes=min(habits.read_bytes, fitting))
