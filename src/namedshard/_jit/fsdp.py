"""`fsdp`: parameters sharded one way between steps, and another way inside of them."""

from collections.abc import Callable
from typing import Any, overload

from namedshard._jit.named_jit import NamedJit, named_jit
from namedshard._plan.mapping import MappingLike


@overload
def fsdp(fn: Callable[..., Any], parameter_mapping: MappingLike, compute_mapping: MappingLike) -> NamedJit: ...


@overload
def fsdp(
    fn: None = None, *, parameter_mapping: MappingLike, compute_mapping: MappingLike
) -> Callable[[Callable[..., Any]], NamedJit]: ...


@overload
def fsdp(fn: MappingLike, parameter_mapping: MappingLike) -> Callable[[Callable[..., Any]], NamedJit]: ...


def fsdp(
    fn: Any = None, parameter_mapping: Any = None, compute_mapping: Any = None
) -> NamedJit | Callable[[Callable[..., Any]], NamedJit]:
    """Compile a step whose arguments and results are sharded one way and whose computation another.

    The pattern of fully sharded data parallelism (Rajbhandari et al., "ZeRO", 2020): parameters rest sharded over the
    data axis and are gathered where they are used. The same as ``named_jit`` with ``in_axis_resources`` and
    ``out_axis_resources`` the parameter mapping and ``axis_resources`` the compute mapping.

    Args:
        fn: The function; leave it out to use this as a decorator: ``@fsdp(parameter_mapping, compute_mapping)``.
        parameter_mapping: For arguments and results.
        compute_mapping: In force inside the function.

    Returns:
        The compiled function, or a decorator.

    Raises:
        TypeError: A mapping is missing.

    Examples:
        >>> import haliax as hax, jax, jax.numpy as jnp, namedshard as ns
        >>> step = ns.fsdp(lambda w: w * 2, {"embed": "data"}, {"batch": "data"})
        >>> with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], ("data",))):
        ...     w = step(hax.named(jnp.arange(4.0), "embed"))
        >>> w.array.tolist()
        [0.0, 2.0, 4.0, 6.0]
    """
    if fn is not None and not callable(fn):
        fn, parameter_mapping, compute_mapping = None, fn, parameter_mapping
    if parameter_mapping is None or compute_mapping is None:
        raise TypeError("fsdp needs a parameter_mapping and a compute_mapping")

    def wrap(function: Callable[..., Any]) -> NamedJit:
        return named_jit(
            function,
            compute_mapping,
            in_axis_resources=parameter_mapping,
            out_axis_resources=parameter_mapping,
        )

    return wrap if fn is None else wrap(fn)
