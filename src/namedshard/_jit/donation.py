"""Donated arguments of compiled functions: which they are, and checks that they can be donated."""

import collections
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from namedshard import _jaxcompat as compat
from namedshard._errors import DonationError, did_you_mean
from namedshard._jit.arguments import parameters_of
from namedshard._jit.program import Output, Program, has_type
from namedshard._jit.store import Options
from namedshard._types import Tracer


def _leaf_mask(spec: Any, value: Any) -> list[bool]:
    specs, structure = jax.tree_util.tree_flatten(spec, is_leaf=lambda x: x is None or callable(x))
    subtrees = zip(specs, structure.flatten_up_to(value), strict=True)
    leaves = ((chosen, leaf) for chosen, subtree in subtrees for leaf in jax.tree_util.tree_leaves(subtree))
    return [bool(chosen(leaf) if callable(chosen) else chosen) for chosen, leaf in leaves]


def _named_positional(name: str, fn: Callable[..., Any], specs: Mapping[str, Any], count: int) -> dict[int, Any]:
    """Those of the named donation specs whose argument is among the ``count`` positional ones, by position."""
    parameters = parameters_of(fn)
    if parameters is None:
        return {}
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {p.name: i for i, p in enumerate(parameters) if p.kind in by_keyword}
    unknown = [key for key in specs if key not in known]
    if unknown and inspect.Parameter.VAR_KEYWORD not in [p.kind for p in parameters]:
        raise DonationError(
            f"{name}: donate_kwargs names {'an argument' if len(unknown) == 1 else 'arguments'} that the function"
            " does not have",
            [f"{key!r}{did_you_mean(key, list(known))}" for key in unknown],
            fix=f"the arguments with names are {', '.join(known) or 'none'}",
        )
    return {known[key]: spec for key, spec in specs.items() if known.get(key, count) < count}


def donation_mask(
    name: str, fn: Callable[..., Any], options: Options, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[bool]:
    """For each leaf of ``(args, kwargs)``: is it donated? Raises `DonationError` where the specs don't fit the call."""
    by_position, by_name = options.donate_args, options.donate_kwargs
    specs = [by_position] * len(args) if isinstance(by_position, bool) else list(by_position or ())
    if len(specs) > len(args):
        raise DonationError(
            f"{name}: donate_args has {len(specs)} entries, but the call has {len(args)} positional arguments",
            fix="give one entry per positional argument, and use donate_kwargs for keyword arguments",
        )
    specs += [False] * (len(args) - len(specs))
    named = dict.fromkeys(kwargs, by_name) if isinstance(by_name, bool) else dict(by_name or {})
    if not isinstance(by_name, bool):
        for i, spec in _named_positional(name, fn, named, len(args)).items():
            specs[i] = specs[i] or spec
    specs += [named.get(k, False) for k in sorted(kwargs)]
    mask: list[bool] = []
    for spec, value in zip(specs, [*args, *(kwargs[k] for k in sorted(kwargs))], strict=True):
        try:
            mask += _leaf_mask(spec, value)
        except ValueError as error:
            raise DonationError(
                f"{name}: a donation spec does not match the structure of its argument",
                str(error).splitlines()[:1],
                fix="give True, False, a function of a leaf, or a tree of these that is a prefix of the argument",
            ) from error
    return mask


def check_shared(program: Program, arrays: Sequence[Any]) -> None:
    """No buffer may be donated and passed again in the same call, not even as part of another array object.

    JAX finds the latter when it runs, and jax 0.10 crashes over it.
    """
    buffers = [compat.first_buffer(x) if type(x) is compat.ArrayImpl and x.size else id(x) for x in arrays]
    # The common case, on the hot path: a set is faster than counting.
    if len(set(buffers)) == len(buffers):
        return
    counts = collections.Counter(buffers)
    lines: list[str] = []
    for shared in dict.fromkeys(buffers[n] for n in program.donate if counts[buffers[n]] > 1):
        same = [n for n, buffer in enumerate(buffers) if buffer == shared]
        what = "are one array" if len({id(arrays[n]) for n in same}) == 1 else "share their memory"
        lines.append(f"{' and '.join(program.paths[n] for n in same)} {what}")
    if lines:
        noun = "donated array is" if len(lines) == 1 else "donated arrays are"
        raise DonationError(
            f"{program.name}: {len(lines)} {noun} passed more than once",
            lines,
            fix="pass a copy (jnp.copy), or do not donate it",
        )


def is_concrete(x: Any) -> bool:
    """Whether it is an array with values, which may have been deleted."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def check_not_deleted(program: Program, arrays: Sequence[Any], concrete: Iterable[int]) -> None:
    """Name the arguments that were donated or deleted before. ``concrete`` numbers those that may have been."""
    gone = [n for n in concrete if arrays[n].is_deleted()]
    if gone:
        noun = "argument leaf was" if len(gone) == 1 else "argument leaves were"
        raise DonationError(
            f"{program.name}: {len(gone)} {noun} donated or deleted before this call",
            [program.paths[n] for n in gone],
            fix="use the result of the call that they were donated to",
        ) from None


def check_donatable(program: Program, arrays: Sequence[Any]) -> None:
    """A donated buffer can only become one output, of its own shape, dtype, shard shape and memory kind.

    A donated argument that no output was computed from element by element, or none that doesn't replace another
    argument, is merely freed, whatever its shape is.
    """
    placed = [n for n in program.donate if not isinstance(arrays[n], Tracer) and getattr(arrays[n], "sharding", None)]
    outputs = program.outputs
    replaced = _replaced(arrays, outputs)
    free = [number for number in range(len(outputs)) if number not in replaced]
    left = [n for n in placed if n not in replaced.values()]
    left = [n for n in left if not any(_fits(arrays[n], outputs[number]) for number in free)]
    lines: dict[int, str] = {}
    for o in (outputs[number] for number in free):
        which = next((n for n in left if n in o.sources and arrays[n].dtype == o.aval.dtype and n not in lines), None)
        if which is not None:
            lines[which] = f"{program.paths[which]}: {_difference(arrays[which].sharding, o)}"
    if lines:
        noun = "argument leaf" if len(lines) == 1 else "argument leaves"
        raise DonationError(
            f"{program.name}: {len(lines)} donated {noun} cannot become the output of the same shape",
            [lines[n] for n in sorted(lines)],
            fix="give input and output the same mapping and memory kind, or do not donate it",
        )


def _replaced(arrays: Sequence[Any], outputs: Sequence[Output]) -> dict[int, int]:
    """Which argument each output replaces: as many as possible, each by one output that is computed from it and fits.

    A maximum bipartite matching by augmenting paths (Kuhn, 1955).
    """
    uses = collections.Counter(n for o in outputs for n in o.sources if n >= 0)
    fitting = {n: [m for m, o in enumerate(outputs) if n in o.sources and _fits(arrays[n], o)] for n in uses}
    by_output: dict[int, int] = {}
    # A parameter, which only its successor is computed from, comes before its moment, and that before its gradient.
    for n in sorted(fitting, key=lambda n: (uses[n], n)):
        reached: dict[int, int] = {}
        queue = collections.deque([n])
        while queue:
            by = queue.popleft()
            for number in fitting[by]:
                if number not in reached:
                    reached[number] = by
                    queue.append(by_output.get(number, -1))
            if -1 in queue:
                _augment(by_output, reached)
                break
    return by_output


def _augment(by_output: dict[int, int], reached: Mapping[int, int]) -> None:
    """Give a free output to the argument that reached it, the output that this one had to the next, and so on."""
    number = next(number for number in reached if number not in by_output)
    while True:
        by = reached[number]
        had = next((m for m, n in by_output.items() if n == by), None)
        by_output[number] = by
        if had is None:
            return
        number = had


def _difference(have: Any, o: Output) -> str:
    if (kind := have.memory_kind or "device") != o.memory_kind:
        return f"memory kind {kind!r}, but {o.path} is in {o.memory_kind!r}"
    # The compiler may choose for an output that no mapping places; then the array fits.
    assert o.asked is not None
    return f"spec {getattr(have, 'spec', type(have).__name__)}, but {o.path} has {o.asked.spec}"


def _fits(x: Any, o: Output) -> bool:
    return has_type(x, o) and (o.asked is None or x.sharding.shard_shape(x.shape) == o.asked.shard_shape(x.shape))
