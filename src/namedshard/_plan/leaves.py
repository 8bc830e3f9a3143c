"""The leaves of a tree with their paths and names: what every plan starts from."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import equinox as eqx
import haliax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.sharding import PartitionSpec

from namedshard._errors import AxisNamesError
from namedshard._plan.mapping import AxisMapping, carried_mapping, spec_entries
from namedshard._plan.names import UNNAMED, Array, Axes, dotted, fit_names, match_names


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One raw leaf of a tree (as ``jax.tree_util.tree_leaves`` lists them).

    ``names`` is None for plain leaves, and `UNNAMED` for dimensions without a name; ``note`` says why a leaf that has
    names, or a dimension of it, is planned as without. ``sizes`` are those of the named axes, where a dimension is
    several axes; empty where they are the shape. With ``mesh_axes`` a name without a rule that is a mesh axis, or
    several joined by a plus, means these.
    """

    path: str
    value: Any
    names: tuple[str, ...] | None
    own: AxisMapping | None = None
    note: str = ""
    sizes: tuple[int, ...] = ()
    mesh_axes: bool = False

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """The size of the axis that each dimension is named by."""
        return self.sizes or tuple(self.value.shape)


def is_array_like(x: Any) -> bool:
    """True for leaves with a shape and a dtype: JAX and numpy arrays, tracers and ``ShapeDtypeStruct``s.

    Nodes may have both too: ask only about what JAX takes for a leaf.
    """
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype") and not isinstance(x, type)


def axis_name(axis: haliax.Axis | str) -> str:
    """The name of an axis, which may be given by it alone."""
    return axis if isinstance(axis, str) else axis.name


NamesLike: TypeAlias = str | Sequence[Any]
"""Names as one string, or one for each dimension; None for a dimension without."""

NamesOfNode: TypeAlias = Callable[[Any], NamesLike | Mapping[str, NamesLike] | None]

_registered: dict[type, NamesOfNode] = {}


def register_axis_names(cls: type, names: NamesOfNode) -> None:
    """Read axis names off the nodes of a type, as off Haliax's arrays, wherever they are in a tree.

    Args:
        cls: A pytree node type; subclasses count, too.
        names: Called with a node. For a node with one array it returns the names of its dimensions, a string as in
            `AxisMapping` or a tuple; for others a dict of these by field; None where the node has no names. Dimensions
            before those that are named, as ``vmap`` adds them, have no name.

    Raises:
        TypeError: The first argument is no type, or the second can't be called.

    Examples:
        >>> import dataclasses, jax, namedshard as ns
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass
        ... class Linear:
        ...     weight: jax.Array
        ...     bias: jax.Array
        >>> ns.register_axis_names(Linear, lambda _: {"weight": "mlp embed", "bias": "mlp"})
        >>> mesh = jax.sharding.AbstractMesh((4,), ("model",))
        >>> layer = Linear(jax.ShapeDtypeStruct((64, 16), "float32"), jax.ShapeDtypeStruct((64,), "float32"))
        >>> ns.plan(layer, {"mlp": "model"}, mesh)["weight"].spec
        P('model', None)
    """
    if not isinstance(cls, type) or not callable(names):
        raise TypeError("register_axis_names takes a type and a function of its nodes")
    _registered[cls] = names
    _names_of_type.cache_clear()


@functools.cache
def _names_of_type(cls: type) -> NamesOfNode | None:
    """What reads the names off nodes of a type; None for types without."""
    for base in cls.__mro__:
        if base in _registered:
            return _registered[base]
        if base.__module__.partition(".")[0] == "flax" and base.__name__ in _FLAX:
            return _FLAX[base.__name__]
    if not (issubclass(cls, eqx.Module) and dataclasses.is_dataclass(cls)):
        return None
    fields = {
        field.name: field.metadata["axis_names"]
        for field in dataclasses.fields(cls)
        if field.metadata.get("axis_names") is not None and not field.metadata.get("static", False)
    }
    return (lambda _: fields) if fields else None


def _of_variable(variable: Any) -> NamesLike | None:
    """The names in the metadata of a Flax NNX variable."""
    metadata = variable.get_metadata()
    found = (metadata.get(key) for key in ("out_sharding", "sharding", "sharding_names"))
    return next((getattr(names, "spec", names) for names in found if names is not None), None)


# Types are known by their names, so that Flax needn't be installed.
_FLAX: dict[str, NamesOfNode] = {"Partitioned": lambda box: box.names, "Variable": _of_variable}


def _text_of(names: NamesLike | haliax.Axis) -> str:
    """Names as one string; several mesh axes for one dimension, which Flax has, are joined by a plus."""
    if isinstance(names, str | haliax.Axis):
        return axis_name(names)
    listed: Sequence[Any] = spec_entries(names) if isinstance(names, PartitionSpec) else names
    return " ".join(
        UNNAMED if name is None else "+".join(name) if isinstance(name, tuple | list) else axis_name(name)
        for name in cast("Sequence[Any]", listed)
    )


def path_string(path: tuple[Any, ...]) -> str:
    """A leaf path as ``jax.tree_util.keystr`` prints it, without the leading dot."""
    return jax.tree_util.keystr(path).removeprefix(".")


@functools.cache
def jax_can_hold(dtype: Any) -> bool:
    """Whether an array of a dtype can be a JAX array."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True
    return jnp.issubdtype(dtype, np.bool_) or (jnp.issubdtype(dtype, np.number) and dtype.type not in _NUMPY_ONLY)


# Numbers to numpy alone.
_NUMPY_ONLY = (np.timedelta64, np.longdouble, np.clongdouble)


def native_dtype(dtype: Any) -> Any:
    """The dtype in this machine's byte order, which is the only one that JAX takes."""
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).newbyteorder("=")


def jax_dtype(dtype: Any) -> Any:
    """The dtype of the JAX array made from a host array: narrowed where 64-bit types are disabled."""
    return jax.dtypes.canonicalize_dtype(native_dtype(dtype), allow_extended_dtype=True)


def obstacle_to_names(value: Any) -> str:
    """Why an array with names is left as it is; empty if it isn't."""
    if isinstance(value, jax.Ref):
        return "a jax.Ref is changed in place; left as it is"
    return "" if jax_can_hold(value.dtype) else f"JAX has no dtype {value.dtype}; left as it is"


def _misfit(names: Iterable[str], value: Any) -> str:
    return f"names ({', '.join(names)}) do not fit rank {len(value.shape)}; left as it is"


def _of_node(path: str, value: Any, names: NamesLike, *, mesh_axes: bool) -> Leaf:
    """A leaf with names of its node; dimensions before those that are named have none."""
    text, shape = _text_of(names), tuple(value.shape)
    if note := obstacle_to_names(value):
        return Leaf(path, value, None, note=note)
    try:
        found = fit_names(text, shape) or (None if "..." in text else fit_names(f"... {text}", shape))
    except ValueError as error:
        return Leaf(path, value, None, note=f"names {text!r}: {error}; left as it is")
    if found is None:
        return Leaf(path, value, None, note=_misfit(text.split(), value))
    return Leaf(path, value, found.names, None, found.note, found.sizes, mesh_axes)


def _of_named(full: tuple[Any, ...], named: NamedArray) -> Iterator[Leaf]:
    path = path_string(full)
    if not (jax.tree_util.all_leaves([named.array]) and is_array_like(named.array)):
        # A whole tree (a Hessian, the state of optax.sm3), whose arrays the names aren't about.
        yield from (Leaf(leaf.path, leaf.value, None) for leaf in _walk(full, named.array))
        return
    # `named.axes` raises where some tool (optax's factored states) left an array of another rank under the names.
    _, axes = NamedArray.tree_flatten(named)
    names: tuple[str, ...] = tuple(map(axis_name, axes))
    note = _misfit(names, named.array) if len(names) != len(named.array.shape) else obstacle_to_names(named.array)
    yield Leaf(path, named.array, None if note else names, carried_mapping(named), note)


def _walk(prefix: tuple[Any, ...], tree: Any) -> Iterator[Leaf]:
    def named(x: Any) -> bool:
        return isinstance(x, NamedArray) or _names_of_type(type(x)) is not None

    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=named)[0]:
        full, read = prefix + path, _names_of_type(type(node))
        if isinstance(node, NamedArray):
            yield from _of_named(full, node)
        elif read is None:
            yield Leaf(path_string(full), node, None)
        else:
            yield from _of_names(full, node, read(node))


def _of_names(full: tuple[Any, ...], node: Any, names: Any) -> Iterator[Leaf]:
    """The leaves of a node whose type has names: those of each field, or of its only array."""
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    flax = type(node).__module__.startswith("flax.")
    for path, child in children:
        key = getattr(path[-1], "name", "") if path else ""
        given = cast("Mapping[str, Any]", names).get(key) if isinstance(names, Mapping) else names
        if given is not None and is_array_like(child) and not isinstance(child, NamedArray):
            yield _of_node(path_string((*full, *path)), child, given, mesh_axes=flax)
        elif path:
            yield from _walk((*full, *path), child)
        else:
            yield Leaf(path_string(full), child, None)


def _without_placeholders(leaves: list[Leaf]) -> list[Leaf]:
    """Optax's factored states put ``zeros((1,))`` where a parameter of one axis has no state of that kind."""
    ones = [i for i, leaf in enumerate(leaves) if leaf.names and tuple(leaf.value.shape) == (1,)]
    if not ones:
        return leaves
    named = [leaf for leaf in leaves if leaf.names]
    longer = {n for leaf in named for n, size in zip(leaf.names or (), leaf.value.shape, strict=True) if size != 1}
    for i in ones:
        (name,) = leaves[i].names or ("",)
        if name in longer:
            note = f"axis {name} has another size in the other leaves; left as it is"
            leaves[i] = dataclasses.replace(leaves[i], names=None, note=note)
    return leaves


def with_distinct_paths(leaves: list[Leaf]) -> list[Leaf]:
    """The leaves, those of one path with an index appended to it: nodes may give several children one key."""
    taken = collections.Counter(leaf.path for leaf in leaves)
    if len(taken) == len(leaves):
        return leaves
    shared = {path: itertools.count() for path, count in taken.items() if count > 1}
    out: list[Leaf] = []
    for leaf in leaves:
        if (numbers := shared.get(leaf.path)) is not None:
            path = next(path for n in numbers if (path := f"{leaf.path}[{n}]") not in taken)
            taken[path] += 1
            leaf = dataclasses.replace(leaf, path=path)
        out.append(leaf)
    return out


def named_leaves(
    tree: Any, mapping: AxisMapping | None = None, *, lenient: bool = False, beside: Sequence[Array] = ()
) -> list[Leaf]:
    """All raw leaves in order, each with a path that no other has and, where it has them, its axis names.

    Arrays that carry no names get those that the mapping gives to their paths. With ``lenient``, or if it
    fits arrays ``beside`` them, a pattern may fit none that it matches, such as the states of an optimizer.

    Raises:
        AxisNamesError: Names by path don't fit the arrays.
    """
    leaves = with_distinct_paths(_without_placeholders(list(_walk((), tree))))
    return leaves if mapping is None else with_names(leaves, mapping.axes_items, lenient=lenient, beside=beside)


def with_names(leaves: list[Leaf], axes: Axes, *, lenient: bool = False, beside: Sequence[Array] = ()) -> list[Leaf]:
    """The leaves, with names by path for the arrays that have none.

    Raises:
        AxisNamesError: As `match_names` does, or names for a single array are given to several.
    """
    arrays = [i for i, leaf in enumerate(leaves) if is_array_like(leaf.value)]
    bare = [i for i in arrays if leaves[i].names is None and not obstacle_to_names(leaves[i].value)]
    if not axes or not bare:
        return leaves
    alone = next((text for pattern, text in axes if not pattern), None)
    if alone is not None and len(arrays) > 1:
        raise AxisNamesError(
            f"axes={alone!r} names a single array, but there are {len(arrays)}",
            fix=f"name them by leaf path, as in axes={{{dotted(leaves[bare[0]].path)!r}: {alone!r}}}",
        )
    found = [(leaves[i].path, leaves[i].value.shape) for i in bare]
    fitted, notes = match_names(found, axes, len(arrays), lenient=lenient, beside=beside)
    out = list(leaves)
    for n, i in enumerate(bare):
        if n in fitted:
            names, sizes, note = fitted[n]
            out[i] = dataclasses.replace(leaves[i], names=names, sizes=sizes, note=note)
        elif n in notes:
            out[i] = dataclasses.replace(leaves[i], note=notes[n])
    return out
