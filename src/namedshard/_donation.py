"""Donated arguments of compiled functions: which they are, and everything that can go wrong with them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from namedshard._errors import DonationError, message


def _leaf_mask(spec: Any, value: Any) -> list[bool]:
    def is_spec_leaf(x: Any) -> bool:
        return x is None or isinstance(x, bool) or callable(x)

    spec_leaves, spec_def = jax.tree_util.tree_flatten(spec, is_leaf=is_spec_leaf)
    mask: list[bool] = []
    for leaf_spec, subtree in zip(spec_leaves, spec_def.flatten_up_to(value), strict=True):
        for leaf in jax.tree_util.tree_leaves(subtree):
            mask.append(bool(leaf_spec(leaf)) if callable(leaf_spec) else bool(leaf_spec))
    return mask


def donation_mask(donate_args: Any, donate_kwargs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bool]:
    """For each leaf of ``(args, kwargs)``: is it donated?

    Raises:
        DonationError: ``donate_args`` is longer than the arguments, or does not match their structure.
    """
    by_position = [donate_args] * len(args) if isinstance(donate_args, bool) else list(donate_args or ())
    if len(by_position) > len(args):
        raise DonationError(
            message(
                f"donate_args has {len(by_position)} entries, but the call has {len(args)} positional arguments",
                fix="give one entry per positional argument, and use donate_kwargs for keyword arguments",
            )
        )
    by_position += [False] * (len(args) - len(by_position))
    by_name = dict.fromkeys(kwargs, donate_kwargs) if isinstance(donate_kwargs, bool) else dict(donate_kwargs or {})
    mask: list[bool] = []
    named = [*zip(by_position, args, strict=True), *((by_name.get(k, False), kwargs[k]) for k in sorted(kwargs))]
    for spec, value in named:
        try:
            mask += _leaf_mask(spec, value)
        except ValueError as error:
            raise DonationError(
                message(
                    "a donation spec does not match the structure of its argument",
                    str(error).splitlines()[:1],
                    fix="give True, False, a function of a leaf, or a tree of these that is a prefix of the argument",
                )
            ) from error
    return mask


def check_shared(name: str, arrays: Sequence[Any], donate: Sequence[int], paths: Sequence[str]) -> None:
    """No buffer may be donated and passed again in the same call."""
    ids = [id(x) for x in arrays]
    if len(set(ids)) == len(ids):
        return
    counts = Counter(ids)
    shared = {ids[n] for n in donate if counts[ids[n]] > 1}
    if not shared:
        return
    lines = [" and ".join(paths[n] for n, i in enumerate(ids) if i == one) + " are one array" for one in sorted(shared)]
    raise DonationError(
        message(
            f"{name}: {len(lines)} donated {'array is' if len(lines) == 1 else 'arrays are'} passed more than once",
            lines,
            fix="pass a copy (jnp.copy), or do not donate it",
        )
    )


def check_live(name: str, arrays: Sequence[Any], paths: Sequence[str]) -> None:
    """Name the arguments that were donated or deleted before, if that is why a call failed."""
    gone = [n for n, x in enumerate(arrays) if isinstance(x, jax.Array) and not _traced(x) and x.is_deleted()]
    if gone:
        noun = "argument leaf was" if len(gone) == 1 else "argument leaves were"
        raise DonationError(
            message(
                f"{name}: {len(gone)} {noun} donated or deleted before this call",
                [paths[n] for n in gone],
                fix="use the result of the call that they were donated to",
            )
        ) from None


def _traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def check_donatable(
    name: str,
    arrays: Sequence[Any],
    donate: Sequence[int],
    outputs: Sequence[tuple[tuple[int, ...], Any, NamedSharding | None, str]],
    paths: Sequence[str],
) -> None:
    """A donated buffer can only become an output of its own shape, dtype, shard shape and memory kind.

    ``outputs`` holds (shape, dtype, wanted sharding if any, memory kind) of each output.
    """
    lines: list[str] = []
    for n in donate:
        x = arrays[n]
        if not isinstance(x, jax.Array) or _traced(x):
            continue
        alike = [o for o in outputs if o[0] == x.shape and o[1] == x.dtype]
        if not alike or any(_fits(x, want, kind) for _, _, want, kind in alike):
            continue
        _, _, want, kind = alike[0]
        have = x.sharding
        if have.memory_kind != kind:
            lines.append(f"{paths[n]}: memory kind {have.memory_kind!r}, but the output like it is in {kind!r}")
        elif want is not None:
            spec = getattr(have, "spec", type(have).__name__)
            lines.append(f"{paths[n]}: spec {spec}, but the output like it has {want.spec}")
    if lines:
        raise DonationError(
            message(
                f"{name}: {len(lines)} donated {'argument leaf' if len(lines) == 1 else 'argument leaves'} cannot be reused",
                lines,
                fix="give input and output the same mapping and memory kind, or do not donate it",
            )
        )


def _fits(x: jax.Array, want: NamedSharding | None, kind: str) -> bool:
    if x.sharding.memory_kind != kind:
        return False
    return want is None or x.sharding.shard_shape(x.shape) == want.shard_shape(x.shape)
