"""Train a model across two hosts, re-mesh it, and bring it to one of them.

    python examples/two_hosts.py

starts two processes on this machine, each with four virtual CPU devices that the other cannot see: as two hosts have.
Started by a cluster (`srun python examples/two_hosts.py`, or one process on each TPU host with `--worker`), the same
`main` runs on the devices that the cluster gives.
"""

import os
import socket
import subprocess
import sys
import time

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import Mesh

import namedshard as ns

PROCESSES, DEVICES = 2, 4
SECONDS = 300

# --- what is split over what ------------------------------------------------------------------------------------------

Batch, Embed, Mlp = Axis("batch", 64), Axis("embed", 32), Axis("mlp", 128)
# Parameters rest split over all devices; a step splits the hidden layer over 'model' alone, and the batch over 'data'.
RESTING = ns.AxisMapping({"mlp": ("data", "model"), "batch": "data"})
COMPUTE = RESTING | {"mlp": "model"}


class Model(eqx.Module):
    """One hidden layer; it knows nothing of devices."""

    up: hax.nn.Linear
    down: hax.nn.Linear

    @staticmethod
    def init(key: jax.Array) -> "Model":
        up, down = jax.random.split(key)
        return Model(hax.nn.Linear.init(Embed, Mlp, key=up), hax.nn.Linear.init(Mlp, Embed, key=down))

    def __call__(self, x: NamedArray) -> NamedArray:
        return self.down(hax.nn.relu(self.up(x)))


def loss(model: Model, x: NamedArray) -> jax.Array:
    """How far the model is from turning its input around."""
    return ((model(x) + x) ** 2).mean().scalar()


def train_step(model: Model, x: NamedArray) -> tuple[Model, jax.Array]:
    """One step of gradient descent."""
    value, grads = eqx.filter_value_and_grad(loss)(model, x)
    return jax.tree.map(lambda w, g: w - 0.5 * g, model, grads), value


# --- what every process does ------------------------------------------------------------------------------------------


def main() -> None:
    """Every process runs all of this: the same calls in the same order."""
    me = jax.process_index()
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    rows = len(devices) // 2
    mesh = Mesh(np.array(devices).reshape(rows, 2), ("data", "model"))

    # Each process makes only the shards of its own devices.
    model = ns.init(Model.init, jax.random.key(0), mapping=RESTING, mesh=mesh)
    # Data that every process has alike: each puts its own rows. What differs between processes would be an error.
    data = np.random.default_rng(0).standard_normal((Batch.size, Embed.size)).astype(np.float32)
    x = ns.shard(hax.named(data, (Batch, Embed)), RESTING, mesh)

    step = ns.fsdp(train_step, RESTING, COMPUTE)
    with jax.set_mesh(mesh):
        first = last = 0.0
        for i in range(30):
            model, value = step(model, x)
            last = float(ns.to_host(value))
            first = first if i else last
    say(f"trained on {describe(mesh)}: loss {first:.3f} to {last:.3f}")
    assert last < first / 2

    # Now as a cluster that lists its devices in another order would have it: the axes turned, the hosts alternating.
    alternating = [d for pair in zip(devices[:rows], devices[rows:], strict=True) for d in pair]
    other = Mesh(np.array(alternating).reshape(2, rows), ("data", "model"))
    moved = ns.shard(model, RESTING, other)
    say(f"moved to {describe(other)}")

    # To the first process alone; on the others the arrays are None. Both ways it must be the same model.
    before, after = ns.to_host(model, process=0), ns.to_host(moved, process=0)
    if me == 0:
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
        assert float(loss(after, hax.named(data, (Batch, Embed)))) < last
    else:
        assert not jax.tree.leaves(after)
    say(f"gathered to process 0: {sum(x.nbytes for x in jax.tree.leaves(after)):,} bytes, the same values")


def describe(mesh: Mesh) -> str:
    """Which process has each device of a mesh."""
    owners = np.vectorize(lambda d: d.process_index)(mesh.devices)
    return f"{dict(mesh.shape)} of processes {owners.tolist()}"


def say(text: str) -> None:
    """One process speaks for all."""
    if jax.process_index() == 0:
        print(text, flush=True)


# --- how the processes find each other --------------------------------------------------------------------------------


def join() -> None:
    """Join the processes of this job.

    On a cluster that JAX knows (SLURM, Open MPI, Kubernetes, Cloud TPU), `initialize` needs no arguments.
    """
    address = os.environ.get("TWO_HOSTS_ADDRESS")
    if address is None:
        jax.distributed.initialize()
        return
    # Gloo reports every connection on the standard output, which is for what this program says.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=PROCESSES, process_id=int(os.environ["TWO_HOSTS_PROCESS"]))


def start() -> int:
    """Start the processes on this machine, wait for them, and end them if they take too long or one fails."""
    with socket.socket() as held:
        # Bound, not listening: no other program is given the port, and JAX's service shares it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        settings = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "TWO_HOSTS_ADDRESS": f"127.0.0.1:{held.getsockname()[1]}",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker"], env=os.environ | settings | {"TWO_HOSTS_PROCESS": str(i)}
            )
            for i in range(PROCESSES)
        ]
        try:
            end = time.monotonic() + SECONDS
            while any(p.poll() is None for p in processes):
                if time.monotonic() > end or any(p.poll() for p in processes):
                    break
                time.sleep(0.05)
        finally:
            for p in processes:
                if p.poll() is None:
                    p.kill()
            codes = [p.wait() for p in processes]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    if "--worker" in sys.argv or "SLURM_PROCID" in os.environ:
        join()
        main()
        jax.distributed.shutdown()
    else:
        sys.exit(start())
