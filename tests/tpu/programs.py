"""What is read from the TPU compiler's programs, and the steps that the tests compile."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import optax
from jax.sharding import Mesh

import namedshard as ns

HOST = "S(5)"
"""How XLA writes the host's memory space in a layout."""

MAPPING = {"out": "model", "vocab": "data"}
In, Out, Vocab = hax.make_axes(inn=1024, out=1024, vocab=256)
SHAPES = {"w0": (In, Out), "w1": (In, Out), "b": (Out,), "table": (Vocab, In)}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Transfers of whole arrays, and what runs on the hosts.

    Attributes:
        to_device: Transfers from host memory, each of an array or of a slice of one.
        to_host: Transfers to host memory.
        host_collectives: Collectives over the hosts' network.
        host_programs: Computations on the hosts.
    """

    to_device: int
    to_host: int
    host_collectives: int = 0
    host_programs: int = 0


def traffic(compiled: Any) -> Traffic:
    """What a compiled program moves between the memories."""
    text = compiled.as_text()
    # copy-start's result holds the destination and the source.
    copies = re.findall(r"= \(\w+\[[\d,]*\]\{([^}]*)\}, \w+\[[\d,]*\]\{([^}]*)\}[^=]* copy-start\(", text)
    slices = re.findall(r"= \(\(\w+\[[\d,]*\]\{([^}]*)\}[^=]* dynamic-slice-start\(", text)
    return Traffic(
        sum(HOST in source and HOST not in target for target, source in copies) + sum(HOST in s for s in slices),
        sum(HOST in target and HOST not in source for target, source in copies),
        text.count("MegaScaleCollectiveInputStart"),
        text.count('custom_call_target="HostExecute"'),
    )


def device_collectives(compiled: Any) -> int:
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return sum(len(re.findall(rf" {kind}(?:-start)?\(", compiled.as_text())) for kind in kinds)


def structs(mesh: Mesh, mapping: Any = MAPPING, shapes: dict[str, Any] = SHAPES) -> Any:
    """Parameters to lower for."""
    return ns.shard(jax.eval_shape(lambda: {name: hax.zeros(axes) for name, axes in shapes.items()}), mapping, mesh)


def compiled_step(
    tx: Any,
    mesh: Mesh,
    mapping: Any = MAPPING,
    *,
    states: Any = None,
    out_mapping: Any = None,
    params: Any = None,
    donate: bool = True,
    jit: Callable[..., Any] = ns.named_jit,
) -> tuple[Any, Any]:
    """An optimizer's step for a mesh, compiled, and the structs of its state."""
    params = structs(mesh, mapping) if params is None else params
    state = ns.init(tx.init, params, mapping=mapping if states is None else states, mesh=mesh)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        fn = jit(step, mapping if out_mapping is None else out_mapping, donate_args=(donate, donate, False))
        return fn.lower(params, state, params).compile(), state


def in_host_memory(tree: Any) -> int:
    return sum(getattr(x.sharding, "memory_kind", None) == "pinned_host" for x in jax.tree.leaves(tree))
