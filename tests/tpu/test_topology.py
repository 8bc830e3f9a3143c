from jax.experimental import topologies


def test_the_compiler_is_there() -> None:
    assert len(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices) == 8
