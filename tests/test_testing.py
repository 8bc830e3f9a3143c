"""The helpers that users test their own models with: they pass what is right and name all that is not."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import E42, M8, M42, na

import namedshard as ns
from namedshard.testing import (
    assert_equal_bits,
    assert_placed,
    assert_round_trip,
    use_virtual_devices,
    virtual_mesh,
)

MAPPING = {"a": "data", "b": "model"}


def model() -> dict[str, Any]:
    return {"w": na(jnp.arange(32.0).reshape(8, 4), "a b"), "v": na(jnp.arange(8), "a"), "name": "x"}


def test_assert_placed() -> None:
    placed = ns.shard(model(), MAPPING, M42)
    assert_placed(placed, MAPPING, M42)
    assert_placed(placed, MAPPING, M42, memory_kind="device")
    with pytest.raises(AssertionError) as caught:
        assert_placed(placed, {"a": "model"}, M42)
    assert str(caught.value) == (
        "2 of 2 leaves not where the mapping wants it\n"
        "  ['v']: P('data',), wanted P('model',)\n"
        "  ['w']: P('data', 'model'), wanted P('model', None)"
    )
    with pytest.raises(AssertionError) as caught:
        assert_placed(placed, MAPPING, M42, memory_kind="pinned_host")
    assert str(caught.value) == (
        "2 of 2 leaves not where the mapping wants it\n"
        "  ['v']: in 'device', wanted in 'pinned_host'\n"
        "  ['w']: in 'device', wanted in 'pinned_host'"
    )
    with pytest.raises(AssertionError) as caught:
        assert_placed(na(np.zeros(8), "a"), MAPPING, M42)
    assert str(caught.value) == (
        "1 of 1 leaf not where the mapping wants it\n  (root): not an array on a device, but ndarray"
    )
    other_order = virtual_mesh((4, 2), ("data", "model"), order=[4, 5, 6, 7, 0, 1, 2, 3])
    with pytest.raises(AssertionError) as caught:
        assert_placed(ns.shard(na(np.zeros(8), "a"), MAPPING, other_order), MAPPING, M42)
    assert str(caught.value) == (
        "1 of 1 leaf not where the mapping wants it\n  (root): P('data',) on devices [4, 5, 6, 7, 0, 1, 2, 3],"
        " wanted P('data',) on devices [0, 1, 2, 3, 4, 5, 6, 7]"
    )


def test_assert_equal_bits() -> None:
    assert_equal_bits(ns.shard(model(), MAPPING, M42), model())
    nan = np.float32("nan")
    assert_equal_bits({"a": jnp.array([nan, -0.0])}, {"a": jnp.array([nan, -0.0])})
    with pytest.raises(AssertionError) as caught:
        assert_equal_bits(
            {"a": jnp.array([0.0, 1.0]), "b": jnp.ones(2), "c": 1},
            {"a": jnp.array([-0.0, 1.0]), "b": jnp.ones(3), "c": 1.0},
        )
    assert str(caught.value) == (
        "3 of 3 leaves different\n"
        "  ['a']: 1 of 2 elements differ\n"
        "  ['b']: float32[2], expected float32[3]\n"
        "  ['c']: 1, expected 1.0"
    )
    key = jax.random.key(0)
    assert_equal_bits({"a": key}, {"a": jax.random.key(0)})
    with pytest.raises(AssertionError) as caught:
        assert_equal_bits({"a": key}, {"a": jax.random.key_data(key)})
    assert str(caught.value) == "1 of 1 leaf different\n  ['a']: key<fry>[2], expected uint32[2]"
    with pytest.raises(AssertionError) as caught:
        assert_equal_bits([1], (1,))
    assert str(caught.value) == ("the trees have different structures\n  PyTreeDef([*])\n  PyTreeDef((*,))")


def test_assert_round_trip(tmp_path: Path) -> None:
    only_arrays = {k: v for k, v in model().items() if k != "name"}
    reversed_mesh = virtual_mesh((4, 2), ("data", "model"), order=range(7, -1, -1))
    assert_round_trip(only_arrays, tmp_path, mapping=MAPPING, meshes=[M42, E42, reversed_mesh])
    assert_round_trip(only_arrays, tmp_path)


def test_virtual_mesh_and_devices() -> None:
    assert virtual_mesh((8,), ("data",)) == M8
    with pytest.raises(ValueError) as caught:
        virtual_mesh((3, 3), ("x", "y"))
    assert str(caught.value) == "a mesh of shape (3, 3) takes 9 devices; there are 8"
    use_virtual_devices(8)
    with pytest.raises(RuntimeError) as error:
        use_virtual_devices(4)
    assert str(error.value) == ("JAX has started with 8 devices: call use_virtual_devices(4) before anything uses JAX")
    use_virtual_devices(8)
    assert jax.device_count() == 8


def test_virtual_devices_on_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="tpu")] * 8)
    with pytest.raises(RuntimeError) as error:
        use_virtual_devices(8)
    expected = "JAX has started with 8 tpu devices: call use_virtual_devices(8) before anything uses JAX"
    assert str(error.value) == expected


def test_virtual_devices_whatever_the_environment_says() -> None:
    program = """
import jax
from namedshard.testing import use_virtual_devices
use_virtual_devices(3)
print({d.platform for d in jax.devices()}, jax.device_count())
"""
    named = {"JAX_PLATFORMS": "tpu", "JAX_PLATFORM_NAME": "gpu", "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | named, capture_output=True, text=True)
    assert done.stdout == "{'cpu'} 3\n", done.stderr
