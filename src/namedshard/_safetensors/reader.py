"""EFFECTS. Executes reads in several threads, straight from the file into the shards where nothing is converted."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import jax
import ml_dtypes
import numpy as np

from namedshard._place.boxes import local_slices, overlap, shape_of, volume
from namedshard._safetensors.layout import Part, leaf_view
from namedshard._safetensors.ranges import Chunk, ReadSettings, run_offsets
from namedshard._safetensors.source import Source
from namedshard._types import Bounds


@dataclasses.dataclass(eq=False, slots=True)
class ShardBuffer:
    """Host memory for a shard, and its place in its leaf. ``unfit``: by tensor, values that its dtype cannot hold."""

    bounds: Bounds
    array: np.ndarray
    check: bool
    unfit: dict[str, list[Any]] = dataclasses.field(default_factory=dict[str, list[Any]])


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One chunk of one tensor, and the requests that it serves: boxes of the part, each with its shard."""

    chunk: Chunk
    part: Part
    label: str
    dtype: np.dtype[Any]
    scale: float
    requests: tuple[tuple[Bounds, ShardBuffer], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One range of a file: the jobs whose chunks lie in it, in the file's order."""

    source: Source
    jobs: Sequence[Job]

    @property
    def start(self) -> int:
        """Where it begins."""
        return self.jobs[0].chunk.start

    @property
    def useful(self) -> int:
        """The bytes that shards are made of, without the gaps between them."""
        shared = ((job, overlap(box, job.chunk.box)) for job in self.jobs for box, _ in job.requests)
        return sum(volume(both) * job.dtype.itemsize for job, both in shared if both is not None)


def _view(part: Part, box: Bounds, shard: ShardBuffer) -> np.ndarray:
    return leaf_view(part, box, shard.array, [lo for lo, _ in shard.bounds])


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def scaled(array: np.ndarray, factor: float, dtype: np.dtype[Any]) -> np.ndarray:
    """An array times a number, rounded once."""
    wide = np.complex128 if dtype.kind == "c" else np.float64
    return (array.astype(wide) * factor).astype(dtype)


def _convert(job: Job, source: np.ndarray, into: np.ndarray, shard: ShardBuffer) -> None:
    if job.dtype == np.bool_:
        source = np.asarray(source.view(np.uint8) != 0)
    if job.scale != 1:
        source = scaled(source, 1 / job.scale, job.dtype)
    if shard.check and (unfit := find_unfit(source, shard.array.dtype)):
        shard.unfit.setdefault(job.label, []).extend(unfit)
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(into, source, casting="unsafe")


def find_unfit(source: np.ndarray, dtype: np.dtype[Any]) -> list[Any]:
    """The lowest and the highest value, each if the dtype cannot hold it."""
    integers = jax.numpy.issubdtype(dtype, np.integer)
    if not integers:
        source = source[np.isfinite(source)]
    if not source.size:
        return []
    least, most = source.min(), source.max()
    if integers:
        info = ml_dtypes.iinfo(dtype)
        # Compared as Python's numbers: a float32 would round the bound of an int32 up to a value that does not fit.
        exact: Any = int if np.issubdtype(source.dtype, np.integer) else float
        # Not "outside of": NaN compares with nothing.
        fits = exact(least) >= info.min, exact(most) <= info.max
    else:
        with np.errstate(over="ignore"):
            fits = np.isfinite(least.astype(dtype)), np.isfinite(most.astype(dtype))
    return [value for value, fit in zip((least, most), fits, strict=True) if not fit]


def _direct(job: Job) -> np.ndarray | None:
    """The shard's own memory for a chunk, run by run, if its bytes can be read there; its runs are the first axis."""
    chunk = job.chunk
    (box, shard), *others = job.requests
    plain = job.scale == 1 and job.dtype == shard.array.dtype and job.dtype != np.bool_
    if others or not plain or overlap(box, chunk.box) != chunk.box:
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


def _deliver(job: Job, raw: np.ndarray) -> None:
    """Convert and copy a chunk's bytes into the shards that need it."""
    source = raw.view(job.dtype).reshape(shape_of(job.chunk.box))
    for box, shard in job.requests:
        shared = overlap(box, job.chunk.box)
        if shared is not None:
            _convert(job, source[(*local_slices(shared, job.chunk.box), ...)], _view(job.part, shared, shard), shard)


def _execute(read: Read, scratch: Scratch) -> None:
    # Coalesced jobs: one read of everything, from which each takes its bytes.
    if len(read.jobs) > 1:
        raw = scratch.get(max(job.chunk.stop for job in read.jobs) - read.start)
        read.source.read(read.start, memoryview(raw))
        for job in read.jobs:
            at = job.chunk.start - read.start
            _deliver(job, raw[at : at + job.chunk.nbytes])
        return
    job = read.jobs[0]
    chunk = job.chunk
    offsets = run_offsets(job.part, chunk, job.dtype.itemsize)
    # One job, run by run: into the shard itself where it takes the bytes as they are, else by way of a buffer.
    view = _direct(job)
    if view is not None and not view.flags.c_contiguous:
        for index, offset in zip(np.ndindex(*view.shape[: chunk.outer]), offsets, strict=True):
            read.source.read(offset, memoryview(_bytes_of(view[index])))
        return
    raw = scratch.get(chunk.nbytes) if view is None else _bytes_of(view)
    into = memoryview(raw)
    for i, offset in enumerate(offsets):
        read.source.read(offset, into[i * chunk.run_bytes : (i + 1) * chunk.run_bytes])
    if view is None:
        _deliver(job, raw)


def execute_reads(reads: Sequence[Read], advance: Callable[[int], None]) -> None:
    """Execute all reads; ``advance`` is called with the useful bytes of each. The first error ends it."""
    scratch = Scratch()

    def execute(read: Read) -> None:
        _execute(read, scratch)
        advance(read.useful)

    threads = max((read.source.settings.threads for read in reads), default=1)
    with ThreadPoolExecutor(threads, thread_name_prefix="namedshard-read") as pool:
        futures = [pool.submit(execute, read) for read in reads]
        finished, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
    for future in finished:
        future.result()


def limit_buffers(settings: ReadSettings, budget: int) -> ReadSettings:
    """The settings with reads so small that the buffers of all threads stay within a budget."""
    fitting = max(64 << 10, budget // (2 * settings.threads))
    return dataclasses.replace(settings, read_bytes=min(settings.read_bytes, fitting))
