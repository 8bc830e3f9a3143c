"""Arguments that are not placed as a compiled function needs them: every class named, and every printed fix works."""

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import DEVICES, E8, E42, M8, M8_REVERSED, M42, assert_exactly, bits, counting, mesh, na, unreduced

import namedshard as ns

M4 = mesh((4,), "data")
RESHARD_FIX = 'fix: or pass on_mismatch="reshard" to move them at each call'


def put(x: Any, where: Mesh, *spec: Any, kind: str | None = None) -> jax.Array:
    return jax.device_put(x, NamedSharding(where, P(*spec), memory_kind=kind))


def told(kind: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is kind
    return str(caught.value)


def warned(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = call(*args, **kwargs)
    return out, [str(w.message) for w in found]


def text(headline: str, *lines: str) -> str:
    return "\n".join([headline, *(f"  {line}" for line in lines)])


@ns.named_jit
def double(x):
    return x * 2


# Each class: the mesh in force, where the argument is, what is said of it, and the spec it would get.
CLASSES: dict[str, tuple[Mesh, Callable[[Any], jax.Array], str, str]] = {
    "subset": (
        M8,
        lambda x: put(x, M4, "data"),
        "[device set, axis sizes] device set [0, 1, 2, 3], but expected [0, 1, 2, 3, 4, 5, 6, 7] (it is a subset); mesh"
        " axes ('data'=4), but expected ('data'=8); a move costs 128 B",
        "'data'",
    ),
    "superset": (
        M4,
        lambda x: put(x, M8, "data"),
        "[device set, axis sizes] device set [0, 1, 2, 3, 4, 5, 6, 7], but expected [0, 1, 2, 3] (it is a superset);"
        " mesh axes ('data'=8), but expected ('data'=4); a move costs 128 B",
        "'data'",
    ),
    "disjoint": (
        M4,
        lambda x: put(x, mesh((4,), "data", devices=DEVICES[4:]), "data"),
        "[device set] device set [4, 5, 6, 7], but expected [0, 1, 2, 3] (it is disjoint); a move costs 128 B",
        "'data'",
    ),
    "overlapping": (
        M4,
        lambda x: put(x, mesh((4,), "data", devices=DEVICES[2:]), None, "data"),
        "[device set] device set [2, 3, 4, 5], but expected [0, 1, 2, 3] (it is overlapping); a move costs 128 B",
        "None, 'data'",
    ),
    "device order": (
        M8,
        lambda x: put(x, M8_REVERSED, "data"),
        "[device order] device order [7, 6, 5, 4, 3, 2, 1, 0], but expected [0, 1, 2, 3, 4, 5, 6, 7]; a move costs"
        " 128 B",
        "'data'",
    ),
    "axis names": (
        M8,
        lambda x: put(x, mesh((8,), "rows"), "rows"),
        "[axis names] mesh axes ('rows'=8), but expected ('data'=8); a move costs 128 B",
        "",
    ),
    "axis names, replicated": (
        M8,
        lambda x: put(x, mesh((8,), "rows")),
        "[axis names] mesh axes ('rows'=8), but expected ('data'=8); a move costs 0 B",
        "",
    ),
    "axis sizes": (
        M42,
        lambda x: put(x, mesh((2, 4), "data model"), "data"),
        "[axis sizes] mesh axes ('data'=2, 'model'=4), but expected ('data'=4, 'model'=2); a move costs 128 B",
        "'data'",
    ),
    "axis types": (
        M8,
        lambda x: put(x, E8, "data"),
        "[axis types] axis types (Explicit), but expected (Auto); a move costs 0 B",
        "'data'",
    ),
    "axis types, the other way": (
        E8,
        lambda x: put(x, M8, "data"),
        "[axis types] axis types (Auto), but expected (Explicit); a move costs 0 B",
        "'data'",
    ),
    "committed to one device": (
        M8,
        lambda x: jax.device_put(x, DEVICES[3]),
        "[committed to one device] committed to one device, 3, but expected on [0, 1, 2, 3, 4, 5, 6, 7]; a move costs"
        " 128 B",
        "",
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_is_named_whole_and_its_fix_works(name: str) -> None:
    where, place, said, spec = CLASSES[name]
    x = place(counting(8, 4))
    with jax.set_mesh(where):
        assert told(ns.MismatchError, double, x) == text(
            "double: 1 of 1 argument leaf is not placed as the call needs",
            f"x: {said}",
            f"fix: x = jax.device_put(x, jax.NamedSharding(mesh, jax.P({spec})))  # mesh: the one in force",
            RESHARD_FIX,
        )
        fixed = run_fixes(told(ns.MismatchError, double, x), {"x": x, "mesh": where})
        assert bits(double(fixed["x"])) == bits(counting(8, 4) * 2)
        assert_exactly(double(fixed["x"]), where, P(*eval(f"({spec},)" if spec else "()")))
        # The other modes: moved at each call, or left to JAX.
        moved = ns.named_jit(lambda x: x * 2, on_mismatch="reshard")
        assert bits(moved(x)) == bits(counting(8, 4) * 2)
        assert moved.report().reshards == 1
        assert moved.report().bytes_moved == 128


def run_fixes(message: str, names: dict[str, Any]) -> dict[str, Any]:
    """Executes the assignments among the fixes, as a user would copy them."""
    scope = {"jax": jax, "ns": ns, "eqx": eqx, **names}
    for line in message.splitlines():
        code = line.strip().removeprefix("fix: ")
        if line.startswith("  fix: ") and " = " in code and not code.startswith("or "):
            exec(code, scope)
    return scope


class Layer(eqx.Module):
    weight: hax.NamedArray
    bias: jax.Array
    scale: jax.Array
    size: int = eqx.field(static=True)

    def __call__(self, x):
        return x * self.weight

    @ns.named_jit
    def step(self, x):
        return x * self.weight


def layer(where: Mesh) -> Layer:
    weight = na(put(counting(8, 4), where, "data"), "batch embed")
    return Layer(weight, put(counting(8), where, "data"), put(np.float32(2), where), 4)


def test_all_leaves_are_named_at_once_under_the_users_own_names() -> None:
    @ns.named_jit(in_axis_resources={"batch": "data", "embed": ns.first("model", None)})
    def step(model, *batches, targets, step=0):
        return batches[0]

    model = layer(M8_REVERSED)
    with jax.set_mesh(M8):
        good = na(put(counting(8, 4), M8, "data"), "batch embed")
        wrong_spec = na(put(counting(8, 8), M8, None, "data"), "batch embed")
        targets = {"a b": [put(counting(8, 4), mesh((8,), "rows"), "rows"), wrong_spec]}
        said = told(ns.MismatchError, step, model, good, wrong_spec, targets=targets, step=3)
        order = (
            "[device order] device order [7, 6, 5, 4, 3, 2, 1, 0], but expected [0, 1, 2, 3, 4, 5, 6, 7]; a move costs"
        )
        rules = "{'batch': 'data', 'embed': ns.first('model', None)}"
        assert said == text(
            "step: 6 of 7 argument leaves are not placed as the call needs",
            f"model.weight: {order} 128 B",
            f"model.bias: {order} 32 B",
            f"model.scale: {order} 4 B",
            "batches[1]: [spec] spec P(None, 'data'), but expected P('data', None); a move costs 256 B",
            "targets['a b'][0]: [axis names] mesh axes ('rows'=8), but expected ('data'=8); a move costs 128 B",
            "targets['a b'][1]: [spec] spec P(None, 'data'), but expected P('data', None); a move costs 256 B",
            f"fix: model = ns.shard(model, {rules})",
            f"fix: batches = ns.shard(batches, {rules})",
            f"fix: targets = ns.shard(targets, {rules})",
            "fix: model = eqx.tree_at(lambda t: t.bias, model, replace_fn=lambda x: jax.device_put(x,"
            " jax.NamedSharding(mesh, jax.P('data'))))",
            "fix: model = eqx.tree_at(lambda t: t.scale, model, replace_fn=lambda x: jax.device_put(x,"
            " jax.NamedSharding(mesh, jax.P())))",
            "fix: targets = eqx.tree_at(lambda t: t['a b'][0], targets, replace_fn=lambda x: jax.device_put(x,"
            " jax.NamedSharding(mesh, jax.P())))  # mesh: the one in force",
            RESHARD_FIX,
        )
        fixed = run_fixes(said, {"model": model, "batches": (good, wrong_spec), "targets": targets, "mesh": M8})
        out = step(fixed["model"], *fixed["batches"], targets=fixed["targets"], step=3)
        assert bits(out.array) == bits(counting(8, 4))


def test_methods_and_functions_that_hold_arrays() -> None:
    model = layer(M8_REVERSED)
    order = "[device order] device order [7, 6, 5, 4, 3, 2, 1, 0], but expected [0, 1, 2, 3, 4, 5, 6, 7]; a move costs"

    def said(name: str, root: str, fix: list[str]) -> str:
        return text(
            f"{name}: 3 of 4 argument leaves are not placed as the call needs",
            f"{root}.weight: {order} 128 B",
            f"{root}.bias: {order} 32 B",
            f"{root}.scale: {order} 4 B",
            *fix,
            RESHARD_FIX,
        )

    def in_tree(root: str, picked: str, spec: str) -> str:
        return (
            f"fix: {root} = eqx.tree_at(lambda t: {picked}, {root}, replace_fn=lambda x: jax.device_put(x,"
            f" jax.NamedSharding(mesh, jax.P({spec}))))"
        )

    def without_mapping(root: str) -> list[str]:
        last = in_tree(root, "t.scale", "") + "  # mesh: the one in force"
        return [in_tree(root, "[t.weight, t.bias]", "'data'"), last]

    with jax.set_mesh(M8):
        x = na(put(counting(8, 4), M8, "data"), "batch embed")
        assert told(ns.MismatchError, model.step, x) == said("Layer.step", "self", without_mapping("self"))
        assert told(ns.MismatchError, ns.named_jit(model), x) == said("Layer", "fn", without_mapping("fn"))
        by_method = told(ns.MismatchError, ns.named_jit(model.__call__), x)
        assert by_method == said("Layer.__call__", "self", without_mapping("self"))
        by_bound = told(ns.MismatchError, ns.named_jit(model.step), x)
        assert by_bound.splitlines()[1] == f"  self.weight: {order} 128 B"

        mapped = told(ns.MismatchError, ns.named_jit(model, {"batch": "data"}), x)
        fix = [
            "fix: fn = ns.shard(fn, {'batch': 'data'})",
            in_tree("fn", "t.bias", "'data'"),
            in_tree("fn", "t.scale", "") + "  # mesh: the one in force",
        ]
        assert mapped == said("Layer", "fn", fix)
        with ns.axis_mapping({"batch": "data"}):
            assert "\n  fix: self = ns.shard(self)\n" in told(ns.MismatchError, model.step, x)
        fixed = run_fixes(by_method, {"self": model, "mesh": M8})["self"]
        assert bits(ns.named_jit(fixed)(x).array) == bits(counting(8, 4) ** 2)

        def scale(factor, x, *, offset):
            return x * factor + offset

        held = jax.tree_util.Partial(scale, put(counting(8), M8_REVERSED), offset=put(counting(8), M8))
        assert told(ns.MismatchError, ns.named_jit(held), put(counting(8), M8)) == text(
            "scale: 1 of 3 argument leaves is not placed as the call needs",
            f"factor: {order} 32 B",
            "fix: factor = jax.device_put(factor, jax.NamedSharding(mesh, jax.P()))  # mesh: the one in force",
            RESHARD_FIX,
        )


def test_positional_arguments_of_functions_without_a_signature() -> None:
    with jax.set_mesh(M8):
        said = told(ns.MismatchError, ns.named_jit(max), put(counting(8), M8), jax.device_put(counting(8), DEVICES[0]))
    assert said.splitlines()[1].startswith("  args[1]: [committed to one device]")


def test_the_fix_keeps_the_memory_kind_and_the_policy() -> None:
    with jax.set_mesh(M8):
        x = put(counting(8), M8_REVERSED, "data", kind="pinned_host")
        said = told(ns.MismatchError, double, x)
        assert "jax.NamedSharding(mesh, jax.P('data'), memory_kind='pinned_host')" in said
        assert run_fixes(said, {"x": x, "mesh": M8})["x"].sharding == NamedSharding(
            M8, P("data"), memory_kind="pinned_host"
        )
        loose = ns.named_jit(lambda x: x, ns.AxisMapping({"a": ("data",)}, indivisible="replicate"))
        said = told(ns.MismatchError, loose, na(put(counting(8), M8_REVERSED, "data"), "a"))
        assert "\n  fix: x = ns.shard(x, {'a': 'data'}, indivisible='replicate')\n" in said


def test_without_a_mesh_the_arguments_must_share_their_devices() -> None:
    @ns.named_jit
    def add(a, b, c):
        return a + b + c

    x = counting(8, 4)
    assert told(ns.MismatchError, add, put(x, M8, "data"), put(x, M8_REVERSED, "data"), {"k": put(x, M4)}) == text(
        "add: 2 of 3 argument leaves are not placed as the call needs",
        "b: [device order] device order [7, 6, 5, 4, 3, 2, 1, 0], but a is on [0, 1, 2, 3, 4, 5, 6, 7]; a move costs"
        " 128 B",
        "c['k']: [device set] device set [0, 1, 2, 3], but a is on [0, 1, 2, 3, 4, 5, 6, 7] (it is a subset); a move"
        " costs 128 B",
        "fix: put all arguments on one mesh with ns.shard(..., mesh=mesh), and call under jax.set_mesh(mesh)",
    )
    # Nothing can be moved where nothing says where to.
    moving = ns.named_jit(lambda a, b: a + b, on_mismatch="reshard")
    told(ns.MismatchError, moving, put(x, M8, "data"), put(x, M8_REVERSED, "data"))
    assert bits(add(put(x, M8, "data"), put(x, M8), x)) == bits(x * 3)
    assert bits(add(x, x, x)) == bits(x * 3)


def test_an_argument_that_is_still_to_be_summed() -> None:
    x, mapping = counting(8, 4), {"a": "data"}
    parts = na(unreduced(x), "a b")
    summed = ns.named_jit(lambda w: ns.shard(w, mapping), mapping)
    strict = ns.named_jit(lambda w: w, in_axis_resources=mapping)
    moving = ns.named_jit(lambda w: w * 1, in_axis_resources=mapping, on_mismatch="reshard")
    with jax.set_mesh(E42):
        assert bits(summed(parts).array) == bits(moving(parts).array) == bits(x)
        # The type of the argument is another, though entries and mesh are the same.
        assert bits(summed(na(put(x, E42), "a b")).array) == bits(x)
        assert "  w: [spec] spec P(None, None, unreduced={'model'}" in told(ns.MismatchError, strict, parts)
    with jax.set_mesh(M42):
        assert bits(moving(parts).array) == bits(x)


def test_a_mapping_needs_a_mesh() -> None:
    for options in ({"axis_resources": {"a": "data"}}, {"in_axis_resources": {"a": "data"}}):

        def step(x):
            return x

        assert told(ns.NoMeshError, ns.named_jit(step, **options), na(counting(8), "a")) == text(
            "step: there is an axis mapping, but no mesh is in force",
            "fix: enter jax.set_mesh(mesh) around the call (in each thread: contexts are thread-local)",
        )
    with ns.axis_mapping({"a": "data"}):
        told(ns.NoMeshError, double, na(counting(8), "a"))


def test_an_abstract_mesh_is_enough_for_shapes_only() -> None:
    step = ns.named_jit(lambda x: x * 2, {"a": "data"})
    with jax.sharding.use_abstract_mesh(M8.abstract_mesh):
        shape = step.eval_shape(na(jax.ShapeDtypeStruct((8,), np.float32), "a")).array
        assert shape.sharding == NamedSharding(M8.abstract_mesh, P("data"))
        for _ in range(2):
            assert told(ns.NoMeshError, step, na(counting(8), "a")) == text(
                "<lambda>: the mesh in force ('data'=8) is abstract and has no devices",
                "fix: enter jax.set_mesh(mesh) around the call; an abstract mesh will do for eval_shape",
            )


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_two_meshes_in_force() -> None:
    with jax.set_mesh(M8), M42:
        assert told(ns.AmbiguousMeshError, double, counting(8)) == text(
            "two meshes are in force: jax.set_mesh gives ('data'=8) on devices [0, 1, 2, 3, 4, 5, 6, 7], `with mesh:`"
            " gives ('data'=4, 'model'=2) on devices [0, 1, 2, 3, 4, 5, 6, 7]",
            "fix: leave one of the two contexts, or pass mesh=",
        )
    with jax.set_mesh(M8), M8:
        assert bits(double(counting(8))) == bits(counting(8) * 2)
    with M8:
        assert_exactly(ns.named_jit(lambda x: x, {"a": "data"})(na(counting(8), "a")), M8, P("data"))


@pytest.mark.parametrize("mode", ["error", "reshard", "warn"])
def test_host_and_uncommitted_arguments_are_placed_without_fuss(mode: str) -> None:
    step = ns.named_jit(lambda x, y, z: (x, y, z), in_axis_resources={"a": "data"}, on_mismatch=mode)
    uncommitted = jax.numpy.arange(8.0)
    assert not uncommitted.committed
    with jax.set_mesh(M8):
        out = step(na(counting(8), "a"), na(uncommitted, "a"), np.float32(3))
        assert_exactly(out[0], M8, P("data"))
        assert_exactly(out[1], M8, P("data"))
        assert_exactly(out[2], M8, P())
        assert step.report() == ns.Report(calls=1, traces=1, compiles=1, reshards=0, bytes_moved=0)


def test_arrays_made_under_a_mesh_are_placed_though_they_are_committed() -> None:
    step = ns.named_jit(lambda key, x: x, in_axis_resources={"a": "data"})
    with jax.set_mesh(M8):
        key, zeros = jax.random.key(0), na(jax.numpy.zeros(8), "a")
        assert zeros.array.committed and zeros.array.sharding.is_fully_replicated
        assert_exactly(step(key, zeros), M8, P("data"))
        # Replicated elsewhere, somebody chose it.
        with pytest.raises(ns.MismatchError):
            step(key, na(put(counting(8), M8_REVERSED), "a"))
        assert step.report() == ns.Report(calls=1, traces=1, compiles=1, reshards=0, bytes_moved=0)


def test_reshard_moves_just_those_and_warns_at_the_third_call_in_a_row() -> None:
    @ns.named_jit(in_axis_resources={"a": "data"}, on_mismatch="reshard")
    def step(model, x):
        return model["w"] + x

    with jax.set_mesh(M8):
        model = {"w": na(put(counting(8, 8), M8, None, "data"), "a b"), "fine": na(put(counting(8), M8, "data"), "a")}
        x = na(put(counting(8, 8), M8, None, "data"), "a b")
        outs = []
        for expected in ([], [], [1], [], []):
            out, said = warned(step, model, x)
            outs.append(out)
            assert len(said) == sum(expected)
            if said:
                assert said == [
                    text(
                        "step: 3 calls in a row moved the same arguments, 512 B per call",
                        "model['w']: 256 B",
                        "x: 256 B",
                        "fix: place them once, before the loop, with ns.shard",
                    )
                ]
        for out in outs:
            assert_exactly(ns.shard(out, {"a": "data"}), M8, P("data"))
            assert bits(out.array) == bits(counting(8, 8) * 2)
        assert step.report() == ns.Report(calls=5, traces=1, compiles=1, reshards=10, bytes_moved=5 * 512)


def test_a_call_in_between_breaks_the_row() -> None:
    step = ns.named_jit(lambda x: x, in_axis_resources={"a": "data"}, on_mismatch="reshard")
    with jax.set_mesh(M8):
        bad, good = na(put(counting(8), M8), "a"), na(put(counting(8), M8, "data"), "a")
        said = [warned(step, x)[1] for x in (bad, bad, good, bad, bad, good, bad)]
        assert said == [[]] * 7


def test_warn_goes_on_as_jax_does_and_warns_once() -> None:
    step = ns.named_jit(lambda x: x * 2, in_axis_resources={"a": "data"}, on_mismatch="warn")
    with jax.set_mesh(M8):
        x = na(put(counting(8, 8), M8, None, "data"), "a b")
        out, said = warned(step, x)
        assert bits(out.array) == bits(counting(8, 8) * 2)
        assert said == [
            text(
                "<lambda>: 1 of 1 argument leaf is not placed as the call needs",
                "x: [spec] spec P(None, 'data'), but expected P('data', None); a move costs 256 B",
                "fix: x = ns.shard(x, {'a': 'data'})",
                RESHARD_FIX,
            )
        ]
        assert warned(step, x)[1] == []
        assert step.report().reshards == 0


def test_validation_looks_again_when_shardings_change() -> None:
    with jax.set_mesh(M8):
        assert bits(double(put(counting(8), M8))) == bits(counting(8) * 2)
        told(ns.MismatchError, double, put(counting(8), M8_REVERSED))
        told(ns.MismatchError, double, put(counting(8), M8_REVERSED))
        assert bits(double(put(counting(8), M8, "data"))) == bits(counting(8) * 2)
    with jax.set_mesh(M8_REVERSED):
        assert bits(double(put(counting(8), M8_REVERSED))) == bits(counting(8) * 2)
        told(ns.MismatchError, double, put(counting(8), M8))


def test_a_worker_thread_without_contexts_is_told_so() -> None:
    said: list[str] = []

    def work() -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            ns.named_jit(lambda x: x, in_axis_resources=None)(na(counting(8), "a"))
        said.extend(str(w.message) for w in found)
        try:
            ns.named_jit(lambda x: x, {"a": "data"})(na(counting(8), "a"))
        except ns.NoMeshError as error:
            said.append(str(error))

    with jax.set_mesh(M8), ns.axis_mapping({"a": "data"}):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert said == [
        text(
            "<lambda>: no axis mapping and no mesh is in force in this thread (another thread has one: contexts are"
            " thread-local, so pass mapping= and mesh= along)",
            "fix: enter ns.axis_mapping(mapping) and jax.set_mesh(mesh) in this thread",
        ),
        text(
            "<lambda>: there is an axis mapping, but no mesh is in force",
            "fix: enter jax.set_mesh(mesh) around the call (in each thread: contexts are thread-local)",
        ),
    ]


def test_wrong_options_are_refused() -> None:
    for name in ("in_shardings", "static_argnums", "donate_argnames"):
        assert told(TypeError, ns.named_jit, double, **{name: 0}) == (
            f"named_jit takes no {name}: named arguments and results are placed by in_axis_resources and"
            " out_axis_resources, non-array arguments are static, and donate_args donates"
        )
    # Under these tests' type checker the outer function would not be reached.
    unchecked = inspect.unwrap(ns.named_jit)
    assert told(TypeError, unchecked, double, on_mismatch="fix") == (
        "on_mismatch='fix': use 'error', 'reshard' or 'warn'"
    )
