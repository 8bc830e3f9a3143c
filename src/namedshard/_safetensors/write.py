"""EFFECTS. Writes this process's files of a checkpoint, under other names until all are written."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from namedshard._errors import CheckpointError, ExchangeError, NarrowingError
from namedshard._place import boxes
from namedshard._place import transfer as collective
from namedshard._place.reader import ShardReader
from namedshard._processes import coordination
from namedshard._safetensors.commit import PartialFile
from namedshard._safetensors.header import encode_header
from namedshard._safetensors.layout import Part, boxes_in, leaf_bounds, leaf_view
from namedshard._safetensors.outgoing import File, Outgoing
from namedshard._safetensors.ranges import LOCAL, Chunk, plan_chunks, run_offsets
from namedshard._safetensors.reader import find_unfit, limit_buffers, scaled
from namedshard._types import Bounds


class Failures:
    """Keeps the first error of this process until the next round, in which the other processes wait for it.

    Attributes:
        broken: Whether this process can no longer take part in exchanges of arrays.
        placed: Whether the new checkpoint is in place; None before a round fails, and if it isn't known then.
    """

    def __init__(self, rounds: coordination.Rounds, what: str) -> None:
        self.rounds = rounds
        self.broken = False
        self.placed: bool | None = None
        self._what = what
        self._first: BaseException | None = None
        self._of_writing = False

    def __bool__(self) -> bool:
        return self._first is not None

    @contextlib.contextmanager
    def caught(self, *, of_writing: bool = False, exchange: bool = False) -> Generator[None]:
        """Keep an error for the next round, if it is the first.

        ``of_writing``: if it is the operating system's, it is a file's. ``exchange``: it breaks an exchange of arrays.
        """
        try:
            yield
        except BaseException as error:
            self.broken |= exchange
            if self._first is None:
                self._first, self._of_writing = error, of_writing and isinstance(error, OSError)

    def round(self, content: Mapping[str, Any] | None = None, *, exchanging: bool = False) -> list[Mapping[str, Any]]:
        """Each process's message; raises on every process if any of them has failed. A collective.

        Messages say ``placed`` once process 0 has tried to put the new checkpoint in place. ``exchanging``: an exchange
        of arrays follows, if nobody has failed.
        """
        if self.broken and self._first is not None:
            # A process that died does not come to a round, and JAX ends those that wait for it.
            raise self._first
        self.rounds.exchanging = exchanging
        message = {**(content or {}), **self._report()}
        try:
            found = self.rounds.next_round(message)
            failed = [(process, report) for process, report in enumerate(found) if "error" in report]
            if not failed:
                return found
            self.placed = found[0].get("placed", False)
        except (coordination.ProcessFailed, ExchangeError) as error:
            self.placed = None if "placed" in message else False
            if self._first is None and coordination.exchange_failure():
                headline = f"{self._what} is not saved: an exchange of arrays between processes broke off"
                raise coordination.exchange_error(headline + self._before()) from error
            failed = [(error.process, {"error": error.reason})] if isinstance(error, coordination.ProcessFailed) else []
        # Every process raises now, so none starts an exchange.
        self.rounds.exchanging = False
        if self._first is None:
            raise self._error(*failed[0])
        if self._of_writing:
            raise self._error(self.rounds.me, message) from self._first
        raise self._first

    def _report(self) -> Mapping[str, Any]:
        """This process's failure as part of its message."""
        if self._first is None:
            return {}
        if self._of_writing:
            return {"error": str(getattr(self._first, "strerror", None) or self._first), "of_writing": True}
        # A plain one is about all processes alike.
        whole = {"text": str(self._first)} if type(self._first) is CheckpointError else {}
        return {"error": coordination.first_line(self._first)} | whole

    def _error(self, process: int, report: Mapping[str, Any]) -> CheckpointError:
        """The error for the failure of a process."""
        if "text" in report:
            return CheckpointError(report["text"])
        why, fix = report["error"], "free some space, or save elsewhere"
        if not report.get("of_writing"):
            why = f"is not saved: process {process} broke off: {why}"
            fix = f"see to the error of process {process}, and save again on every process"
        elif process == self.rounds.me:
            why = f"cannot be written: {why}"
        else:
            why = f"cannot be written: it failed on process {process}: {why}"
        return CheckpointError(f"{self._what} {why}{self._before()}", fix=fix)

    def _before(self) -> str:
        if self.placed is None:
            return "; it is not known whether it has replaced what was there before"
        return "; it has replaced what was there before" if self.placed else "; what was there before is untouched"


Shards: TypeAlias = dict[Bounds, Any]
"""A leaf, or some of it, as shards that this process can read: bounds in the leaf, and data."""


def _read_shards(reader: ShardReader, shards: Shards, part: Part, box: Bounds) -> np.ndarray:
    """The elements of a box of a part, in its atoms' order; a view of a shard that has them all."""
    out: np.ndarray | None = None
    for bounds, data in shards.items():
        for held in boxes_in(part, bounds):
            shared = boxes.overlap(held, box)
            if shared is None:
                continue
            region = leaf_bounds(part, shared)
            view = leaf_view(part, shared, reader.read(data, bounds, region), [lo for lo, _ in region])
            if shared == box:
                return view
            if out is None:
                out = np.empty(boxes.shape_of(box), data.dtype)
            out[boxes.local_slices(shared, box)] = view
    assert out is not None
    return out


def _shards_here(value: Any) -> Shards:
    """The distinct shards of a leaf that this process has."""
    if isinstance(value, jax.Array):
        return {boxes.bounds_of(shard.index, value.shape): shard.data for shard in value.addressable_shards}
    array = np.asarray(value)
    return {boxes.whole(array.shape): array}


def _gather_region(reader: ShardReader, value: jax.Array, region: Bounds, owner: int, budget: int) -> Shards:
    """A region of a shared array on one process; nothing on the others. A collective."""
    device = next(d for d in jax.devices() if d.process_index == owner)
    buffers: Shards = {}
    if owner == jax.process_index():
        buffers[region] = np.empty(boxes.shape_of(region), value.dtype)
    collective.exchange([value], [boxes.layout({device: region}, value.ndim)], [buffers], budget, reader)
    return buffers


def _check_fits(tensor: Outgoing, data: np.ndarray) -> None:
    """Raise if a value does not fit the tensor's integer dtype."""
    if not find_unfit(data, tensor.dtype):
        return
    exact: Any = int if jnp.issubdtype(data.dtype, np.integer) else float
    least, most = exact(data.min()), exact(data.max())
    values = f"values from {least} to {most} do" if least < most else f"value {least} does"
    raise NarrowingError(
        f"tensor {tensor.name!r}: {data.dtype} {values} not fit {tensor.dtype}",
        fix="pass a wider dtype=" if math.isfinite(least) and math.isfinite(most) else "pass a floating dtype=",
    )


def _as_stored(tensor: Outgoing, data: np.ndarray) -> np.ndarray:
    checked = jnp.issubdtype(tensor.dtype, np.integer) and data.dtype != np.bool_
    with np.errstate(over="ignore", invalid="ignore"):
        if tensor.scale != 1:
            data = scaled(data, tensor.scale, np.dtype(np.float64) if checked else tensor.dtype)
        if checked and data.dtype != tensor.dtype and data.size:
            _check_fits(tensor, data)
        return np.ascontiguousarray(data, dtype=tensor.dtype)


@dataclasses.dataclass(eq=False)
class FileWriter:
    """Writes files together with the other processes.

    ``shared`` are the ids of the values that it takes all processes to get at. A failure here ends the writing, but not
    this process's part in exchanges of arrays.
    """

    directory: str
    metadata: dict[str, str]
    budget: int
    shared: frozenset[int]
    failures: Failures
    advance: Callable[[int], None]
    partials: list[PartialFile] = dataclasses.field(default_factory=list[PartialFile])

    def __post_init__(self) -> None:
        self._reader = ShardReader(self.budget // 8)

    def write(self, file: File) -> None:
        """Write one file beside its name, on its owner; the other processes take part in gathering. Raises nothing."""
        head, size = encode_header([(t.name, t.dtype, t.shape) for t in file.tensors], self.metadata)
        partial: PartialFile | None = None
        if file.owner == self.failures.rounds.me and not self.failures:
            with self.failures.caught(of_writing=True):
                # Where it was looked for before, some network file systems believe it absent until they are asked to.
                os.makedirs(self.directory, exist_ok=True)
                partial = PartialFile(os.path.join(self.directory, file.name), size)
                self.partials.append(partial)
                partial.write(0, memoryview(head))
        together = self.exchanged(file)
        # The others wait in an exchange for one that does not come to it.
        with self.failures.caught(exchange=together), coordination.guard_exchange(together):
            self._write_tensors(file, partial, len(head))
        if partial is not None and not self.failures:
            with self.failures.caught(of_writing=True):
                partial.finish()

    def close(self) -> None:
        """Close all files; those that were not committed are removed."""
        for partial in self.partials:
            partial.close()

    def exchanged(self, file: File) -> bool:
        """Whether it takes an exchange of arrays to write a file."""
        return any(id(value) in self.shared for tensor in file.tensors for value, _ in tensor.parts)

    def _write_tensors(self, file: File, partial: PartialFile | None, at: int) -> None:
        settings = limit_buffers(LOCAL, self.budget // 2)
        gathering = dataclasses.replace(settings, read_bytes=max(1 << 16, min(64 << 20, self.budget // 4)))
        with concurrent.futures.ThreadPoolExecutor(settings.threads, thread_name_prefix="namedshard-write") as pool:
            for tensor in file.tensors:
                for value, part in tensor.parts:
                    together = id(value) in self.shared
                    found = plan_chunks(
                        part, [part.whole], tensor.dtype.itemsize, at, gathering if together else settings
                    )
                    write = functools.partial(self._write_chunks, pool, partial, tensor, part)
                    if not together:
                        write(value, found)
                        continue
                    # What all processes share is gathered chunk by chunk, on all of them in the same order.
                    for chunk in found:
                        if self.failures.broken:
                            return
                        gathered = _gather_region(
                            self._reader, value, leaf_bounds(part, chunk.box), file.owner, self.budget // 4
                        )
                        if gathered:
                            write(gathered, [chunk])
                at += tensor.nbytes

    def _write_chunks(
        self,
        pool: concurrent.futures.Executor,
        partial: PartialFile | None,
        tensor: Outgoing,
        part: Part,
        value: Any,
        found: Iterable[Chunk],
    ) -> None:
        """Write chunks of a part from the leaf's value, or from those of its shards that were gathered."""
        if partial is None or self.failures:
            return
        with self.failures.caught():
            held = value if isinstance(value, dict) else _shards_here(value)
            pending = [pool.submit(self._write_chunk, partial, tensor, part, held, chunk) for chunk in found]
            for future in pending:
                with self.failures.caught(of_writing=True):
                    count = future.result()
                if self.failures:
                    return
                # Whatever it raises is the caller's own, also where it looks like a file's.
                self.advance(count)

    def _write_chunk(self, file: PartialFile, tensor: Outgoing, part: Part, shards: Shards, chunk: Chunk) -> int:
        if self.failures:
            return 0
        data = memoryview(
            _as_stored(tensor, _read_shards(self._reader, shards, part, chunk.box)).reshape(-1).view(np.uint8)
        )
        for i, offset in enumerate(run_offsets(part, chunk, tensor.dtype.itemsize)):
            file.write(offset, data[i * chunk.run_bytes : (i + 1) * chunk.run_bytes])
        return data.nbytes
